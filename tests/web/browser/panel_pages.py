"""Start `paceline ui` and open its pages in a browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from paceline.web.runs.discovery import run_id as id_of

ARGUMENTS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-features=SpareRendererForSitePerProcess",
]
# Tests set their own cache folder, but Playwright's browsers are in the cache of the user.
if sys.platform.startswith("linux"):
    os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", str(Path.home() / ".cache" / "ms-playwright"))
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Server:
    """A running ``paceline ui`` process."""

    folder: Path
    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def serve(folder: Path, port: int = 0, start_folder: Path | None = None) -> Server:
    """Start a server in ``start_folder`` (default: in the served folder), and wait until it
    listens."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "ui",
        str(folder),
        "--port",
        str(port),
        "--no-browser",
        "--json",
    ]
    process = subprocess.Popen(
        command,
        cwd=start_folder or folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server ended before it listened"
    return Server(folder, json.loads(line)["url"], process)


def run_id(folder: Path, name: str) -> str:
    """Return the id of a run in the API."""
    assert (folder / name).is_dir()
    return id_of(name)


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """Open a page in a new context. A script error or a blocked resource fails the test."""
    options = {
        "viewport": {"width": 1280, "height": 900},
        "locale": "en-GB",
        "color_scheme": "light",
        **options,
    }
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(30_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: _record_error(message, errors))
    page.goto(url)
    yield page
    context.close()
    assert not errors, errors


def _record_error(message: ConsoleMessage, errors: list[str]) -> None:
    # The page handles a lost server, a missing run and rejected requests. The browser also logs
    # these as console errors.
    expected = (
        "ERR_CONNECTION",
        "ERR_INCOMPLETE",
        "status of 404",
        "status of 400",
        "status of 409",
        "ERR_EMPTY_RESPONSE",
        "ERR_NETWORK",
    )
    if message.type == "error" and not any(text in message.text for text in expected):
        errors.append(message.text)


#: Texts that are shown, without code, logs and texts that another language replaces.
_SHOWN_TEXTS = """
() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (parent.closest("pre, code, script, style, noscript, svg title")) continue;
    if (parent.checkVisibility() || parent.closest("svg")) texts.push(walker.currentNode.data);
  }
  const names = ["aria-label", "data-label", "title"];
  for (const name of names)
    for (const element of document.querySelectorAll(`[${name}]`))
      if (element.checkVisibility()) texts.push(element.getAttribute(name));
  return texts;
}
"""
_ENGLISH = re.compile(r"[A-Za-z]{2,},?(?: [A-Za-z]{2,},?){2,}")


def english_texts(page: Page) -> list[str]:
    """Return the shown texts with at least three English words in a row that are not marked."""
    texts = [" ".join(text.split()) for text in page.evaluate(_SHOWN_TEXTS)]
    return [text for text in texts if _ENGLISH.search(text) and "（英文）" not in text]


@cache
def why_no_browser() -> str | None:
    """Return why no Chromium is available, or None if one is."""
    if any(shutil.which(name) for name in NAMES):
        return None
    with sync_playwright() as playwright:
        path = Path(playwright.chromium.executable_path)
    return (
        None
        if path.exists()
        else f"no {', '.join(NAMES)} on PATH, and Playwright has no browser at {path}"
    )

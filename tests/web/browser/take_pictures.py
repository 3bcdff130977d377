"""Takes the pictures of docs/panel-pictures.md: each page of the panel in light, dark and phone
width.

python tests/web/browser/take_pictures.py FOLDER      # runs in it: at least two finished ones, one
of them named `first`
"""

import sys
from pathlib import Path

from panel_pages import ARGUMENTS, NAMES, opened, run_id, serve
from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

OUTPUT = Path(__file__).parents[3] / "docs" / "images" / "panel"
WAYS = {
    "light": {"viewport": {"width": 1280, "height": 860}},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 780}},
    "zh": {"viewport": {"width": 1280, "height": 860}, "locale": "zh-CN"},
}
IN_CHINESE = ("runs", "run-overview", "new")
TABS = (
    "overview",
    "ranks",
    "traffic",
    "memory",
    "world",
    "samples",
    "log",
    "config",
    "checkpoints",
    "report",
)
TITLES = {
    "runs": "List of runs",
    **{f"run-{tab}": f"Run: {tab}" for tab in TABS},
    "run-world": "Run: topology",
    "compare": "Compare runs",
    "new": "Start a run",
    "chat": "Chat",
}
ALT_TEXTS = {
    "light": "light colors",
    "dark": "dark colors",
    "phone": "phone width",
    "zh": "in Chinese",
}
COLOURS = 96  # of a picture's palette: pages of text and lines need no more


def pages(folder: Path) -> dict[str, str]:
    """name → address behind the `#`."""
    names = sorted(path.parent.name for path in folder.glob("*/events.jsonl"))
    first = run_id(folder, "first")
    compared = ",".join(run_id(folder, name) for name in names[:3])
    return {
        "runs": "/",
        **{f"run-{tab}": f"/run/{first}/{tab}" for tab in TABS},
        "compare": f"/compare/{compared}",
        "new": "/new",
        "chat": f"/run/{first}/chat",
    }


def take(browser: Browser, url: str, place: str, way: str, path: Path) -> None:
    with opened(browser, url, **WAYS[way]) as page:
        page.goto(f"{url.partition('?')[0]}#{place}")
        page.wait_for_timeout(2500)
        if place == "/new":
            expect(page.locator("#plan-verdict")).not_to_be_empty(timeout=60_000)
        if place.endswith("/chat"):
            page.locator(".choice label").last.click()  # both models
            page.fill("#chat-max-tokens", "24")
            page.fill("#question", "What does json.dumps do?")
            page.keyboard.press("Enter")
            expect(page.locator(".answer-base p")).to_contain_text("tokens/s", timeout=60_000)
        page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(folder: Path) -> None:
    import shutil

    OUTPUT.mkdir(exist_ok=True)
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    server = serve(folder)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            for name, place in pages(folder).items():
                for way in WAYS:
                    if way == "zh" and name not in IN_CHINESE:
                        continue
                    take(browser, server.url, place, way, OUTPUT / f"{name}-{way}.png")
            browser.close()
    finally:
        server.stop()
    rows = [
        f"| {title} | " + " | ".join(_image(name, way) for way in WAYS if way != "zh") + " |"
        for name, title in TITLES.items()
    ]
    text = [
        "# Screenshots of the panel",
        "",
        "Every page of [the panel](how-to/panel.md) with light colors, with dark colors and on a"
        " phone. The pictures show real runs;",
        "`tests/web/browser/take_pictures.py` takes them.",
        "",
        "| page | light | dark | phone |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "## In Chinese",
        "",
        *(_image(name, "zh") for name in IN_CHINESE),
    ]
    (OUTPUT.parents[1] / "panel-pictures.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def _image(name: str, way: str) -> str:
    return (
        f'<img src="images/panel/{name}-{way}.png" alt="{TITLES[name]}, {ALT_TEXTS[way]}"'
        f' width="{150 if way == "phone" else 380}">'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

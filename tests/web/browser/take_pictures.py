"""Takes the pictures of docs/panel-pictures.md: each page of the panel in light, dark and phone width.

python tests/web/browser/take_pictures.py FOLDER      # runs in it: at least two finished ones, one of them named `first`
"""

from __future__ import annotations

import sys
from pathlib import Path

from panel_pages import ARGUMENTS, NAMES, opened, run_id, serve
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

OUTPUT = Path(__file__).parents[3] / "docs" / "images" / "panel"
WAYS = {
    "light": {"viewport": {"width": 1280, "height": 860}},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 780}},
}
TABS = ("overview", "ranks", "traffic", "memory", "world", "samples", "log", "config", "checkpoints", "report")
COLOURS = 96  # of a picture's palette: pages of text and lines need no more


def pages(folder: Path) -> dict[str, str]:
    """name → address behind the `#`."""
    names = sorted(one.parent.name for one in folder.glob("*/events.jsonl"))
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
        page.wait_for_load_state("networkidle") if place == "/new" else page.wait_for_timeout(2500)
        if place.endswith("/chat"):
            page.get_by_role("textbox").last.fill("What does json.dumps do?")
        page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(folder: Path) -> None:
    import shutil

    OUTPUT.mkdir(exist_ok=True)
    own = next((found for name in NAMES if (found := shutil.which(name))), None)
    server = serve(folder)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=own, args=ARGUMENTS)
            for name, place in pages(folder).items():
                for way in WAYS:
                    take(browser, server.url, place, way, OUTPUT / f"{name}-{way}.png")
            browser.close()
    finally:
        server.stop()
    rows = [
        f"| {name} | "
        + " | ".join(f'<img src="images/panel/{name}-{way}.png" width="{150 if way == "phone" else 380}">' for way in WAYS)
        + " |"
        for name in pages(folder)
    ]
    text = ["# Pictures of the panel", "", "Of real runs; taken by `tests/web/browser/take_pictures.py`.", ""]
    text += ["| page | light | dark | phone |", "| --- | --- | --- | --- |", *rows]
    (OUTPUT.parents[1] / "panel-pictures.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

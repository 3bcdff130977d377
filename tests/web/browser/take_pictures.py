"""Take the screenshots of docs/panel-pictures.md: each page of the panel with light colors, with
dark colors and on a phone.

python tests/web/browser/take_pictures.py FOLDER

FOLDER contains at least two finished runs, one of which is named `first`.
"""

import sys
from pathlib import Path

from panel_pages import ARGUMENTS, NAMES, opened, run_id, serve
from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

OUTPUT = Path(__file__).parents[3] / "docs" / "images" / "panel"
VARIANTS = {
    "light": {"viewport": {"width": 1280, "height": 860}},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 780}},
    "zh": {"viewport": {"width": 1280, "height": 860}, "locale": "zh-CN"},
}
VARIANT_TITLES = {"light": "light colors", "dark": "dark colors", "phone": "phone width"}
IN_CHINESE = ("runs", "run-overview", "new", "plan")
TABS = {
    "overview": "overview",
    "ranks": "ranks",
    "traffic": "traffic",
    "memory": "memory",
    "world": "topology",
    "samples": "samples",
    "log": "log",
    "config": "config",
    "checkpoints": "checkpoints",
    "report": "report",
}
TITLES = {
    "runs": "List of runs",
    **{f"run-{tab}": f"Run: {title}" for tab, title in TABS.items()},
    "compare": "Compare runs",
    "new": "Start a run",
    "plan": "Plan for other devices",
    "learn": "Learn how an algorithm works",
    "chat": "Chat",
}
PALETTE_SIZE = 96  # enough for pages of text and lines


def pages(folder: Path) -> dict[str, str]:
    """Return the hash of the address of each page."""
    names = sorted(path.parent.name for path in folder.glob("*/events.jsonl"))
    first = run_id(folder, "first")
    compared = ",".join(run_id(folder, name) for name in names[:3])
    return {
        "runs": "/",
        **{f"run-{tab}": f"/run/{first}/{tab}" for tab in TABS},
        "compare": f"/compare/{compared}",
        "new": "/new",
        "plan": "/plan",
        "learn": "/learn",
        "chat": f"/run/{first}/chat",
    }


def take(browser: Browser, url: str, address: str, variant: str, path: Path) -> None:
    with opened(browser, url, **VARIANTS[variant]) as page:
        page.goto(f"{url.partition('?')[0]}#{address}")
        page.wait_for_timeout(2500)
        if address == "/new":
            expect(page.locator("#plan-verdict")).not_to_be_empty(timeout=60_000)
        if address == "/plan":
            expect(page.locator(".verdict-line")).to_be_visible(timeout=60_000)
        if address.endswith("/chat"):
            page.fill("#chat-max-tokens", "24")
            page.fill("#question", "What is 17 + 25?")
            page.keyboard.press("Enter")
            expect(page.locator(".answer-tuned p")).to_contain_text("tokens/s", timeout=60_000)
        page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(PALETTE_SIZE).save(path, optimize=True)


def main(folder: Path) -> None:
    import shutil

    OUTPUT.mkdir(exist_ok=True)
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    server = serve(folder)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            for name, address in pages(folder).items():
                for variant in VARIANTS:
                    if variant == "zh" and name not in IN_CHINESE:
                        continue
                    take(browser, server.url, address, variant, OUTPUT / f"{name}-{variant}.png")
            browser.close()
    finally:
        server.stop()
    rows = [
        f"| {title} | " + " | ".join(_image(name, variant) for variant in VARIANT_TITLES) + " |"
        for name, title in TITLES.items()
    ]
    lines = [
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
    (OUTPUT.parents[1] / "panel-pictures.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _image(name: str, variant: str) -> str:
    width = 150 if variant == "phone" else 380
    text = f"{TITLES[name]}, {VARIANT_TITLES.get(variant, 'in Chinese')}"
    return f'<img src="images/panel/{name}-{variant}.png" alt="{text}" width="{width}">'


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""Ask a vision-language model about an image in the panel's chat."""

import io
import re
from pathlib import Path

import event_logs
import pytest
from panel_pages import opened, run_id, serve
from PIL import Image
from playwright.sync_api import Browser, expect
from vision_models import make_model

LONG_MS = 120_000


@pytest.mark.soak
def test_ask_about_an_image(browser: Browser, tmp_path: Path) -> None:
    event_logs.finished(tmp_path / "pictures", steps=4)
    make_model(tmp_path / "pictures" / "model", "llava")
    (tmp_path / "pictures" / "config.yaml").write_text(
        f"model: {tmp_path}/pictures/model\ndataset: rows.jsonl\n", encoding="utf-8"
    )
    event_logs.finished(tmp_path / "texts", steps=4)
    content = io.BytesIO()
    Image.new("RGB", (36, 24), "red").save(content, "PNG")
    image = {"name": "red.png", "mimeType": "image/png", "buffer": content.getvalue()}
    panel = serve(tmp_path)
    try:
        chat = f"{panel.url}#/run/{run_id(tmp_path, 'pictures')}/chat"
        with opened(browser, chat, viewport={"width": 390, "height": 800}) as page:
            page.fill("#chat-max-tokens", "6")
            page.set_input_files("#chat-image", [image, {**image, "name": "other.png"}])
            chosen = page.locator(".chat-form .chat-images img")
            expect(chosen).to_have_count(2)
            page.get_by_role("button", name="Remove this image").first.click()
            expect(chosen).to_have_count(1)
            large = {**image, "name": "large.png", "buffer": bytes(6 << 20)}
            page.set_input_files("#chat-image", large)
            expect(page.locator(".chat-form [role=alert]")).to_contain_text("large.png")
            page.fill("#question", "Which color?")
            page.keyboard.press("Enter")
            expect(chosen).to_have_count(0)
            expect(page.locator(".turn .asked img")).to_have_count(1)
            answer = page.locator(".answer-tuned p")
            expect(answer).to_have_text(re.compile("tokens/s"), timeout=LONG_MS)
            page.fill("#question", "And now?")
            page.keyboard.press("Enter")
            expect(answer.last).to_have_text(re.compile("tokens/s"), timeout=LONG_MS)
        with opened(browser, f"{panel.url}#/run/{run_id(tmp_path, 'texts')}/chat") as page:
            expect(page.locator("#question")).to_be_visible()
            expect(page.locator("#chat-image")).to_have_count(0)
    finally:
        panel.stop()

"""The page of a run in a browser: what can be done with the run, its model, and its samples."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import event_logs
import pytest
from panel_pages import opened
from panels import Served, serve_panel
from playwright.sync_api import Browser, Page, expect

CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is <b>2 < 3</b>?<|im_end|>\n"
    "<|im_start|>assistant\nTrue<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
MISTRAL = "<s>[INST] Hi [/INST]"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 0}
    config = {"model": "builtin:qwen2-micro", "train_args": schedule}
    derived = {"steps": 20, "epochs": 0.2, "learning_rate": 2e-3}
    done = event_logs.finished(tmp_path / "done", config=config, derived=derived)
    (done / "model").mkdir()
    with open(done / "events.jsonl", "a") as log:
        texts = [(CHAT, "Because 2<|im_end|>"), (LLAMA, "Hi<|eot_id|>"), (MISTRAL, "Hello</s>")]
        samples = [
            {"prompt": prompt, "text": text, "reference": "Two is less.<|im_end|>"}
            for prompt, text in [*texts, ("Once upon", "")]
        ]
        event = {"type": "sample", "time": 1.0, "step": 20, "samples": samples}
        log.write(json.dumps(event) + "\n")
    stopped = event_logs.begin(tmp_path / "stopped")
    event_logs.emit_steps(stopped, 1, 5)
    stopped.emit({"type": "run_end", "status": "stopped", "step": 5, "reason": "stopped"})
    stopped.close()
    with serve_panel(tmp_path) as served:
        yield served


def open_run(page: Page, served: Served, name: str, tab: str = "overview") -> None:
    page.evaluate("address => location.hash = address", f"#/run/{served.find_run_id(name)}/{tab}")
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()


def buttons(page: Page) -> list[str]:
    texts: list[str] = page.locator(".run-head .page-head .end > *").evaluate_all(
        "nodes => nodes.map((node) => node.id + (node.classList.contains('main') ? '!' : ''))"
    )
    return texts


def test_finished_run_has_one_primary_action_and_can_be_trained_longer(
    browser: Browser, served: Served
) -> None:
    url = f"http://127.0.0.1:{served.panel.port}/?token={served.panel.token}"
    with opened(browser, url, viewport={"width": 1440, "height": 900}) as page:
        open_run(page, served, "stopped")
        assert buttons(page) == ["resume!", "duplicate"]
        expect(page.locator(".run-place")).to_contain_text(str(served.panel.folder / "stopped"))
        open_run(page, served, "done")
        assert buttons(page) == ["chat!", "longer", "export", "duplicate"]
        expect(page.locator(".run-place code")).to_have_text(
            str(served.panel.folder / "done/model")
        )
        expect(page.locator(".run-place button")).to_have_text("Copy")
        expect(page.locator("[data-key='f.epoch']")).to_contain_text("of 0.2")
        expect(page.locator("[data-key='f.wall'] .figure-value")).to_have_text("12.5 s")
        one_line = "nodes => nodes.every((node) => node.getBoundingClientRect().height < 24)"
        captions = page.locator(
            ".run-head .figures > .figure > .figure-beside:not(:has(.progress))"
        )
        assert captions.count() >= 6
        assert captions.evaluate_all(one_line)
        page.locator("#longer").click()
        page.fill("#longer-steps", "20")
        rates = page.locator("#longer-rate")
        expect(rates).to_contain_text("The run ends at step 40. The learning rate (linear)")
        expect(rates).to_contain_text("continues at 0.001 and ends at 5.0e-5.")
        page.fill("#longer-steps", "60")
        expect(rates).to_contain_text("rises from 0.001 to 0.0015")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.locator("#longer")).to_be_focused()


def test_samples_are_bubbles_without_control_tokens(browser: Browser, served: Served) -> None:
    url = f"http://127.0.0.1:{served.panel.port}/?token={served.panel.token}"
    with opened(browser, url) as page:
        open_run(page, served, "done", "samples")
        chat, llama, mistral, plain = (page.locator(".sample").nth(index) for index in range(4))
        expect(chat.locator(".instruction")).to_have_text(re.compile("^System: Be brief.$"))
        expect(chat.locator(".asked")).to_have_text(["User: What is <b>2 < 3</b>?", "User: Why?"])
        expect(chat.locator(".answer-past")).to_have_text(re.compile("^Assistant: True$"))
        expect(llama.locator(".asked")).to_have_text(["User: Hello"])
        expect(mistral.locator(".asked")).to_have_text(["User: Hi"])
        expect(plain.locator(".asked")).to_have_text(["Prompt: Once upon"])
        expect(page.locator(".sample-text")).to_have_text(["Because 2", "Hi", "Hello", "(empty)"])
        output, reference = (chat.locator(".answers .answer").nth(index) for index in range(2))
        boxes = output.bounding_box(), reference.bounding_box()
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] < boxes[1]["x"]
        expect(page.locator("main")).not_to_contain_text("<|")

"""The completions of a run in a browser: search, order, steps and pages, on any screen."""

import json
from collections.abc import Iterator
from pathlib import Path

import event_logs
import pytest
from made_runs import HOSTILE
from panel_pages import opened
from panels import Served, serve_panel
from playwright.sync_api import Browser, Page, expect


def write_rollout(folder: Path, step: int, prompts: int) -> None:
    lines = [
        {
            "prompt": prompt,
            "index": index,
            "completion_ids": [1] * (index + 2),
            "rewards": {"exact": float(index % 2), "format": 0.25 if index else None},
            "reward": 10.0 * prompt + index,
            "advantage": index - 1.5,
            "truncated": index == 3,
            "prompt_text": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
            f"What is {prompt} + {HOSTILE}?<|im_end|>\n<|im_start|>assistant\n",
            "completion": f"Answer {index} to {prompt}: " + "long" * 40 * index,
        }
        for prompt in range(prompts)
        for index in range(4)
    ]
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"step-{step:08d}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("completions")
    root = event_logs.finished(folder / "group")
    write_rollout(root / "rollouts", 3, 1)
    write_rollout(root / "rollouts", 7, 8)
    event_logs.finished(folder / "plain")
    with serve_panel(folder) as served:
        yield served


def open_run(page: Page, served: Served, name: str, tab: str) -> None:
    page.goto(f"http://127.0.0.1:{served.panel.port}/#/run/{served.find_run_id(name)}/{tab}")


def test_completions_are_searched_ordered_and_paged(browser: Browser, served: Served) -> None:
    with opened(browser, f"http://127.0.0.1:{served.panel.port}/") as page:
        open_run(page, served, "plain", "overview")
        expect(page.get_by_role("link", name="Overview")).to_be_visible()
        expect(page.get_by_role("link", name="Completions")).to_have_count(0)
        open_run(page, served, "group", "overview")
        page.get_by_role("link", name="Completions").click()
        cards, status = page.locator("main .answer"), page.locator("#tab p[role=status]")
        prompts = page.locator("main .sample")
        expect(cards).to_have_count(20)
        expect(prompts).to_have_count(5)
        expect(status).to_contain_text("1–20 of 32")
        expect(prompts.first.locator(".instruction")).to_contain_text("Be brief.")
        expect(prompts.first.locator(".asked")).to_contain_text("What is 0 + <img")
        expect(cards.nth(1)).to_contain_text("Reward 1 · exact 1 · format 0.25 · Advantage -0.5")
        page.get_by_role("button", name="Next page").click()
        expect(cards).to_have_count(12)
        page.get_by_label("Order").select_option("best")
        expect(cards.first).to_contain_text("Reward 73")
        expect(cards.first).to_contain_text("cut off at the largest length")
        page.get_by_role("searchbox").fill("answer 2 to 5")
        expect(cards).to_have_count(1)
        page.get_by_role("searchbox").fill("nowhere")
        expect(page.locator("main")).to_contain_text("No completion contains this text.")
        page.get_by_role("searchbox").fill("")
        expect(cards).to_have_count(20)
        page.get_by_label("Rollout of step").select_option("3")
        expect(cards).to_have_count(4)
        expect(page.get_by_role("button", name="Next page")).to_be_hidden()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_is_too_wide(browser: Browser, served: Served, locale: str, width: int) -> None:
    url = f"http://127.0.0.1:{served.panel.port}/"
    with opened(browser, url, locale=locale, viewport={"width": width, "height": 900}) as page:
        open_run(page, served, "group", "completions")
        expect(page.locator("main .answer")).to_have_count(20)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        heading = page.locator(".answer-head").first
        expect(heading).to_contain_text("奖励" if locale == "zh-CN" else "Reward")

"""Test the page Plan in a browser: sliders by keyboard, the memory by kind, phone width."""

from itertools import pairwise

import pytest
from panel_pages import Server, opened
from playwright.sync_api import Browser, Page, expect
from test_access import OVERFLOW, visit

#: A plan is a process of its own, on a machine that may be busy.
LONG_MS = 120_000
ADDRESS = "#/plan?model=builtin:qwen2-micro&device=T4&count=1"


def planned(page: Page) -> None:
    expect(page.locator("#whatif-verdict")).to_be_visible(timeout=LONG_MS)
    expect(page.get_by_text("Planning…")).to_have_count(0, timeout=LONG_MS)


@pytest.mark.slow
@pytest.mark.soak
def test_sliders_change_the_plan(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        visit(page, ADDRESS)
        planned(page)
        expect(page.locator("#whatif-verdict")).to_have_text("Fits: single")
        memory = page.locator(".facts dd").first.inner_text()
        assert page.locator(".bars .fill-4").count() >= 2
        lines = page.locator(".bars-limit").evaluate_all(
            "lines => lines.map(line => line.getBoundingClientRect()).map(box => [box.x, box.top,"
            " box.bottom])"
        )
        assert len({round(x, 1) for x, _, _ in lines}) == 1  # one line through all bars
        assert all(below[1] <= line[2] + 1 for line, below in pairwise(lines))
        slider = page.get_by_label("Tokens per sample")
        slider.focus()
        for _ in range(2):
            page.keyboard.press("ArrowLeft")
        expect(slider).to_have_attribute("aria-valuetext", "512")
        expect(page.locator(".facts dd").first).not_to_have_text(memory, timeout=LONG_MS)
        planned(page)
        page.get_by_label("Devices", exact=True).focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#whatif-verdict")).to_contain_text("ddp", timeout=LONG_MS)
        assert "count=2" in page.url
        assert "length=512" in page.url
        # The address has the whole set-up.
        page.reload()
        expect(page.get_by_label("Tokens per sample")).to_have_attribute("aria-valuetext", "512")
        planned(page)
        assert "--world-size 2" in page.locator(".command code").inner_text()


@pytest.mark.slow
@pytest.mark.soak
def test_mistakes_and_a_narrow_window(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        visit(page, ADDRESS)
        planned(page)
        assert page.evaluate(OVERFLOW) <= 1
        page.get_by_label("Model (hub id").fill("./no-such-model")
        page.keyboard.press("Tab")
        verdict = page.locator("#whatif-verdict")
        expect(verdict).to_have_text("Planning failed:", timeout=LONG_MS)
        expect(page.locator(".plan")).to_contain_text("no-such-model")
        page.locator("#language").click()
        expect(page.locator("h1")).to_have_text("规划")

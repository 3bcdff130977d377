"""Test the page Learn: the topics, and the player of a recording, on a wide and a narrow window."""

import re
from pathlib import Path

import pytest
from panel_pages import Server, opened
from playwright.sync_api import Browser, Page, expect

import paceline.web
from paceline.explain.catalog import TOPICS

TEXTS = Path(paceline.web.__file__).parent / "static" / "i18n" / "learn.js"


def test_every_topic_has_a_title_and_a_summary_in_both_languages() -> None:
    keys = re.findall(r'"learn\.([\w-]+(?:\.text)?)":', TEXTS.read_text(encoding="utf-8"))
    for topic in TOPICS:
        assert keys.count(topic) == keys.count(f"{topic}.text") == 2, topic


def test_topics_are_in_reading_order(page: Page) -> None:
    page.evaluate("location.hash = '#/learn'")
    links = page.locator(".learn-topics a")
    expect(links).to_have_count(len(TOPICS))
    addresses = [link.get_attribute("href") for link in links.all()]
    assert addresses == [f"#/learn/{topic}" for topic in TOPICS]


@pytest.mark.soak
@pytest.mark.parametrize("width", [1280, 390])
def test_recording_plays_step_by_step(browser: Browser, server: Server, width: int) -> None:
    with opened(browser, server.url) as page:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("location.hash = '#/learn/all-reduce'")
        page.get_by_label("Algorithm").select_option("tree")
        command = page.locator(".learn .command")
        expect(command).to_contain_text("paceline explain all-reduce --algorithm tree")
        page.get_by_label("Ranks").fill("3")
        expect(command).to_contain_text("paceline explain all-reduce --algorithm tree --ranks 3")
        page.get_by_role("button", name="Record").click()
        player = page.frame_locator(".learn-player iframe")
        expect(player.get_by_role("heading", level=1)).to_have_text(
            "All-reduce by tree, 3 ranks", timeout=120_000
        )
        place = player.locator("#place")
        expect(place).to_have_text("0 of 4")
        player.get_by_role("button", name="Next").click()
        expect(place).to_have_text("1 of 4")
        expect(player.locator("#stage svg .chip").first).to_be_attached()
        player.locator("#stage").press("ArrowLeft")
        expect(place).to_have_text("0 of 4")
        player.locator("#speed").select_option("fast")
        player.get_by_role("button", name="Play").click()
        expect(place).to_have_text("4 of 4")
        stage = player.locator("#stage svg").bounding_box()
        assert stage is not None
        assert stage["width"] <= width
        page.evaluate("location.hash = '#/learn/ddp'")
        expect(page.get_by_label("Algorithm")).to_have_count(0)
        page.evaluate("location.hash = '#/learn/all-reduce'")
        expect(page.get_by_label("Algorithm")).to_have_value("tree")
        expect(page.get_by_label("Ranks")).to_have_value("3")
        expect(player.get_by_role("heading", level=1)).to_have_text("All-reduce by tree, 3 ranks")

"""For everyone: no serious finding of axe-core on any page in either theme, keys alone, a phone's
width, Chinese."""

from pathlib import Path

import pytest
from panel_pages import Server, opened, run_id
from playwright.sync_api import Browser, Page, expect

AXE = (Path(__file__).parent / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
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


def pages(server: Server) -> list[str]:
    cluster, first, second = (run_id(server.folder, name) for name in ("cluster", "one", "two"))
    tabs = [f"#/run/{cluster}/{tab}" for tab in TABS]
    return [
        "#/",
        *tabs,
        f"#/compare/{first},{second},{cluster}",
        "#/new",
        f"#/run/{first}/chat",
        "#/no/such",
    ]


def visit(page: Page, address: str) -> None:
    page.evaluate("address => location.hash = address", address)
    page.wait_for_function("() => document.querySelector('main h1, main h2') !== null")
    expect(page.get_by_text("Loading…")).to_have_count(0)
    page.wait_for_load_state("networkidle" if address == "#/new" else "load")


#: How far anything but what scrolls by itself reaches beyond the window.
BEYOND = """
Math.max(...[...document.querySelectorAll("main, main *")]
  .filter(one => !one.closest(".table-wrap, .tabs, .world, pre, code, .sr, .log"))
  .map(one => one.getBoundingClientRect().right)) - innerWidth
"""


@pytest.fixture(scope="module")
def seen(browser: Browser, server: Server) -> dict[str, list[str]]:
    """What is wrong with the pages, each looked at in both themes and at a phone's width: by theme,
    and ``phone``."""
    wrong: dict[str, list[str]] = {"light": [], "dark": [], "phone": []}
    with opened(browser, server.url) as page:
        page.evaluate(AXE)
        for address in pages(server):
            page.set_viewport_size({"width": 1280, "height": 900})
            visit(page, address)
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                expect(page.locator("html")).to_have_attribute("data-theme", theme)
                wrong[theme] += [f"{address}: {violation}" for violation in serious(page)]
            page.set_viewport_size({"width": 390, "height": 844})
            wrong["phone"] += [f"{address}: {beyond} px" for beyond in too_wide(page)]
    return wrong


def too_wide(page: Page) -> list[float]:
    """By how much; empty where all fits, once the charts have followed the window."""
    beyond = page.evaluate(BEYOND)
    for _ in range(30):
        if beyond <= 1:
            return []
        page.wait_for_timeout(100)
        beyond = page.evaluate(BEYOND)
    return [beyond]


def serious(page: Page) -> list[str]:
    result = page.evaluate("axe.run(document, {iframes: false, resultTypes: ['violations']})")
    assert len(result["passes"]) > 10, "axe-core has not looked"
    violations = [
        violation
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        for node in violation["nodes"][:3]
    ]


@pytest.mark.soak
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_a_serious_finding(seen: dict[str, list[str]], theme: str) -> None:
    assert not seen[theme], "\n".join(seen[theme])


def test_no_page_is_wider_than_a_phone(seen: dict[str, list[str]]) -> None:
    assert not seen["phone"], seen["phone"]


def test_keys_alone_are_enough(page: Page, server: Server) -> None:
    expect(page.locator("tr[data-id]").first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("cluster")
    expect(page.locator("tr[data-id]")).to_have_count(1)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('term')"):
            break
    expect(page.locator(".bubble")).to_contain_text("Lower is better")
    page.keyboard.press("Escape")
    expect(page.locator(".bubble")).to_have_count(0)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "cluster":
            break
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) != "none"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="cluster", level=1)).to_be_visible()
    page.get_by_role("application", name="Loss over step").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".chart-wrap [role=status]").first).to_contain_text("step 199: training")


def test_every_figure_says_what_it_means(page: Page, server: Server) -> None:
    visit(page, f"#/run/{run_id(server.folder, 'cluster')}")
    expect(page.locator(".figure").first).to_be_visible()
    for figure in page.locator(".figure").all():
        meaning = figure.locator("button.term").get_attribute("aria-describedby")
        assert len(page.locator(f"#{meaning}").text_content() or "") > 20


def test_chinese_and_dark_are_kept(page: Page, server: Server) -> None:
    page.locator("#language").click()
    expect(page.get_by_role("heading", name="训练", level=1)).to_be_visible()
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    visit(page, f"#/run/{run_id(server.folder, 'cluster')}/ranks")
    expect(page.locator(".callout-warn")).to_contain_text("rank 5 最慢")

"""Accessibility: axe-core on every page in both themes, keyboard only, phone width, Chinese."""

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
        "#/learn/ddp",
        "#/plan?model=builtin:qwen2-micro",
        f"#/run/{first}/chat",
        "#/no/such",
    ]


def visit(page: Page, address: str) -> None:
    page.evaluate("address => location.hash = address", address)
    page.wait_for_function("() => document.querySelector('main h1, main h2') !== null")
    expect(page.get_by_text("Loading…")).to_have_count(0)
    page.wait_for_load_state("networkidle" if address == "#/new" else "load")


#: By how many px the content exceeds the window, without elements that scroll by themselves.
OVERFLOW = """
Math.max(...[...document.querySelectorAll("main, main *")]
  .filter(node => !node.closest(".table-wrap, .tabs, .world, pre, code, .sr, .log"))
  .map(node => node.getBoundingClientRect().right)) - innerWidth
"""


@pytest.fixture(scope="module")
def violations(browser: Browser, server: Server) -> dict[str, list[str]]:
    """Violations by theme."""
    violations: dict[str, list[str]] = {"light": [], "dark": []}
    with opened(browser, server.url) as page:
        page.evaluate(AXE)
        for address in pages(server):
            visit(page, address)
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                expect(page.locator("html")).to_have_attribute("data-theme", theme)
                violations[theme] += [
                    f"{address}: {violation}" for violation in axe_violations(page)
                ]
    return violations


def too_wide(page: Page) -> list[float]:
    """Return by how many px the page is too wide, after the charts have adapted to the window;
    empty if it fits."""
    overflow = page.evaluate(OVERFLOW)
    for _ in range(30):
        if overflow <= 1:
            return []
        page.wait_for_timeout(100)
        overflow = page.evaluate(OVERFLOW)
    return [overflow]


def axe_violations(page: Page) -> list[str]:
    result = page.evaluate("axe.run(document, {iframes: false, resultTypes: ['violations']})")
    assert len(result["passes"]) > 10, "axe-core has checked nothing"
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
def test_pages_have_no_serious_accessibility_violation(
    violations: dict[str, list[str]], theme: str
) -> None:
    assert not violations[theme], "\n".join(violations[theme])


@pytest.fixture(scope="module")
def overflows(browser: Browser, server: Server) -> list[str]:
    """Pages that are too wide for a phone."""
    overflows = []
    with opened(browser, server.url) as page:
        for address in pages(server):
            page.set_viewport_size({"width": 1280, "height": 900})
            visit(page, address)
            page.set_viewport_size({"width": 390, "height": 844})
            overflows += [f"{address}: {overflow} px" for overflow in too_wide(page)]
    return overflows


def test_pages_fit_the_width_of_a_phone(overflows: list[str]) -> None:
    assert overflows == []


def test_pages_work_with_the_keyboard_only(page: Page, server: Server) -> None:
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


def test_every_figure_has_an_explanation(page: Page, server: Server) -> None:
    visit(page, f"#/run/{run_id(server.folder, 'cluster')}")
    expect(page.locator(".figure").first).to_be_visible()
    # In one call, because the page creates the figures again, with other ids, when data arrive.
    meanings, num_figures = page.evaluate(
        "() => [[...document.querySelectorAll('.figure button.term')].map((term) =>"
        " document.getElementById(term.getAttribute('aria-describedby')).textContent),"
        " document.querySelectorAll('.figure').length]"
    )
    assert len(meanings) == num_figures > 0
    assert all(len(meaning) > 20 for meaning in meanings)


def test_language_and_theme_persist(page: Page, server: Server) -> None:
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

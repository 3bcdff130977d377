"""The layout of the pages that show runs: nothing is cut or too wide, on a screen, a tablet and a
phone, in both languages."""

import json
from collections.abc import Iterator
from pathlib import Path

import event_logs
import made_runs
import pytest
from panel_pages import opened
from panels import Served, serve_panel
from playwright.sync_api import Browser, Page, expect

TABS = [
    *("overview", "ranks", "traffic", "memory", "world"),
    *("samples", "log", "config", "checkpoints", "report"),
]
#: Elements that are wider than the window. Tables scroll by themselves, except on a phone.
TOO_WIDE = """
(isPhone) => [...document.querySelectorAll("body *")]
  .filter((node) => !node.closest(".sr, .skip, thead") && (isPhone || !node.closest(".table-wrap")))
  .filter((node) => isPhone || !node.closest("pre, code, .tabs, .world"))
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
  .map((node) => `${node.tagName}.${node.getAttribute("class")}: ${node.textContent.slice(0, 40)}`)
"""
#: Elements whose content is cut or scrolls sideways.
CUT = """
() => [...document.querySelectorAll("main *")]
  .filter((node) => !node.closest(".sr, .one-line, .plot, thead, svg, textarea, select, iframe"))
  .filter((node) => getComputedStyle(node).overflowX !== "visible")
  .filter((node) => node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0)
  .map((node) => `${node.tagName}.${node.className}: ${node.textContent.slice(0, 60)}`)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("layouts")
    event_logs.finished(folder / "a-run-with-a-rather-long-name-of-qwen2-0314-091500", steps=30)
    root = event_logs.finished(folder / "second", steps=30, strategy="zero1")
    (root / "model").mkdir()
    made_runs.world(folder / "cluster")
    made_runs.sweep(folder / "sweep")
    with serve_panel(folder) as served:
        yield served


def addresses(served: Served) -> list[str]:
    runs = served.get("/api/runs")["runs"]
    ids = {run["path"]: run["id"] for run in runs}
    of_sweep = [id for path, id in ids.items() if path.startswith("sweep/")]
    others = [id for path, id in ids.items() if not path.startswith("sweep/")]
    return [
        "#/",
        *(f"#/run/{ids['cluster']}/{tab}" for tab in TABS),
        *(f"#/run/{ids['second']}/{tab}" for tab in ("overview", "checkpoints", "report")),
        f"#/compare/{','.join(others)}",
        f"#/compare/{','.join(of_sweep)}",
    ]


def visit(page: Page, address: str) -> None:
    page.evaluate("address => location.hash = address", address)
    page.wait_for_function("() => document.querySelector('main h1') !== null")
    expect(page.get_by_text("Loading…")).to_have_count(0)
    expect(page.get_by_text("正在加载…")).to_have_count(0)
    page.wait_for_timeout(200)


def faults(page: Page, width: int) -> list[str]:
    """Return what does not fit, after the charts have adapted to the window."""
    found: list[str] = []
    for _ in range(30):
        found = page.evaluate(TOO_WIDE, width < 400)
        found += page.evaluate(CUT) if width < 400 else []
        if not found:
            return []
        page.wait_for_timeout(100)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("language", ["en-GB", "zh-CN"])
def test_pages_of_runs_fit_every_width(browser: Browser, served: Served, language: str) -> None:
    found = []
    url = f"http://127.0.0.1:{served.panel.port}/?token={served.panel.token}"
    with opened(browser, url, locale=language) as page:
        for address in addresses(served):
            visit(page, address)
            for width in (1440, 768, 390):
                page.set_viewport_size({"width": width, "height": 900})
                found += [f"{address} at {width} px: {fault}" for fault in faults(page, width)]
    assert found == [], "\n".join(found)


def test_tables_are_cards_on_a_phone(browser: Browser, served: Served) -> None:
    url = f"http://127.0.0.1:{served.panel.port}/?token={served.panel.token}"
    phone = {"width": 390, "height": 844}
    with opened(browser, url, viewport=phone) as page:
        for tab, label in (("overview", "Step"), ("ranks", "forward"), ("checkpoints", "Size")):
            visit(page, f"#/run/{served.find_run_id('cluster')}/{tab}")
            cell = page.locator(f".cards td[data-label='{label}']").first
            expect(cell).to_be_visible()
            assert cell.evaluate("cell => getComputedStyle(cell).display") == "flex"
            assert cell.evaluate("cell => cell.closest('tr').scrollWidth") < 390


def test_page_of_a_sweep_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    state = made_runs.sweep(tmp_path / "sweep")
    context = browser.new_context(offline=True, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto((state.folder / "sweep.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.locator(".dot")).to_have_count(12)
    expect(page.locator(".importance i")).to_have_count(2)
    cell = page.locator("#runs td[data-label='lora.rank']").first
    assert cell.evaluate("cell => getComputedStyle(cell).display") == "flex"
    assert json.loads((state.folder / "sweep.json").read_text())["metric"]["name"] == "eval_loss"
    context.close()

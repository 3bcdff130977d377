"""The list of runs in a browser: its columns, and what can be done with a run."""

from pathlib import Path

import event_logs
import pytest
from panel_pages import opened
from panels import serve_panel
from playwright.sync_api import Browser, Page, expect

PROBLEM = "CUDA out of memory on rank 1: " + "tried to allocate 2.00 GiB. " * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("first", "second", "third"):
        event_logs.finished(tmp_path / name, derived={"steps": 20, "epochs": 0.2})
    log = event_logs.begin(tmp_path / "broken")
    event_logs.emit_steps(log, 1, 4)
    end = {"type": "run_end", "status": "failed", "step": 4, "reason": PROBLEM, "wall_s": 90.0}
    log.emit(end)
    log.close()
    return tmp_path


def url_of(panel) -> str:
    return f"http://127.0.0.1:{panel.port}/?token={panel.token}"


def row(page: Page, name: str):
    return page.locator("tr[data-id]").filter(has=page.get_by_role("link", name=name, exact=True))


def test_rows_have_duration_epoch_curve_and_one_line_of_message(
    browser: Browser, folder: Path
) -> None:
    with (
        serve_panel(folder) as served,
        opened(browser, url_of(served.panel), viewport={"width": 1440, "height": 900}) as page,
    ):
        cells = row(page, "first").locator("td")
        expect(cells.filter(has_text="12.5 s")).to_have_count(1)
        expect(row(page, "first").locator("[data-label=Epoch]")).to_have_text("0.2 of 0.2")
        curve = row(page, "first").locator(".sparkline")
        expect(curve).to_have_attribute("aria-label", "The loss goes from 9.0000 to 0.4500.")
        expect(curve.locator("path")).to_have_count(1)
        problem = page.locator(".run-problem")
        expect(problem).to_have_attribute("title", PROBLEM)
        box = problem.bounding_box()
        assert box is not None
        assert box["height"] < 25
        page.set_viewport_size({"width": 390, "height": 844})
        box = problem.bounding_box()
        assert box is not None
        assert box["height"] < 25
        # Compare all: the runs that the filters include.
        page.fill("#search", "i")
        expect(page.locator("tr[data-id]")).to_have_count(4)
        page.fill("#search", "r")
        page.select_option("#status", "done")
        page.locator("#compare-all").click()
        expect(page.locator(".compare-runs li")).to_have_count(3)


def test_runs_are_renamed_archived_and_deleted(browser: Browser, folder: Path) -> None:
    with serve_panel(folder) as served, opened(browser, url_of(served.panel)) as page:
        page.get_by_label("Select first for comparison").check()
        page.locator("#rename").click()
        expect(page.get_by_role("dialog")).to_contain_text("The folder stays first")
        page.fill("#new-name", "Baseline <b>")
        page.locator("#dialog-yes").click()
        expect(row(page, "Baseline <b>")).to_contain_text("first")
        assert (folder / "first/events.jsonl").is_file()

        page.locator("#archive").click()
        expect(page.locator("tr[data-id]")).to_have_count(3)
        expect(page.locator("#runs-count")).to_have_text("3 runs")
        page.get_by_label("Show archived (1)").check()
        expect(row(page, "Baseline <b>")).to_contain_text("archived")
        page.reload()  # the address keeps the filter
        page.wait_for_timeout(1000)  # the stream begins with the state of its last look
        page.get_by_label("Select Baseline <b> for comparison").check()
        page.locator("#archive").click()
        expect(page.get_by_label("Show archived (0)")).to_be_checked()
        expect(row(page, "Baseline <b>")).not_to_contain_text("archived")

        page.get_by_role("button", name="Clear selection").click()
        page.get_by_label("Select second for comparison").check()
        page.get_by_label("Select third for comparison").check()
        page.locator("#delete").click()
        expect(page.get_by_role("dialog")).to_contain_text("Delete 2 runs?")
        page.get_by_role("button", name="Cancel").click()
        assert (folder / "second/events.jsonl").is_file()
        page.locator("#delete").click()
        page.locator("#dialog-yes").click()
        expect(page.locator("tr[data-id]")).to_have_count(2)
        assert not (folder / "second").exists()
        assert not (folder / "third").exists()

        live = event_logs.begin(folder / "live")
        page.get_by_label("Select live for comparison").check()
        page.locator("#delete").click()
        expect(page.get_by_role("dialog")).to_contain_text("Still running")
        page.locator("#dialog-yes").click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("live is running")
        page.keyboard.press("Escape")
        live.close()
        assert (folder / "live/events.jsonl").is_file()


def test_without_the_token_nothing_can_be_changed(browser: Browser, folder: Path) -> None:
    with (
        serve_panel(folder) as served,
        opened(browser, url_of(served.panel).partition("?")[0]) as page,
    ):
        page.get_by_label("Select first for comparison").check()
        expect(page.locator("#duplicate")).to_be_visible()
        expect(page.locator("#rename, #archive, #delete")).to_have_count(0)

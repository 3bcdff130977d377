"""Comparison of runs in a browser."""

import re
from pathlib import Path

import pytest
from panel_pages import Server, run_id
from playwright.sync_api import Page, expect


def open_compare(page: Page, server: Server, *names: str) -> None:
    ids = ",".join(run_id(server.folder, name) for name in names)
    page.goto(f"{server.url.split('?')[0]}#/compare/{ids}")
    expect(page.get_by_role("heading", name="Compare", level=1)).to_be_visible()


@pytest.mark.soak
def test_two_selected_runs_are_compared(page: Page) -> None:
    page.get_by_label("Select one for comparison").check()
    expect(page.locator("#compare")).to_have_count(0)
    page.get_by_label("Select two for comparison").check()
    page.locator("#compare").click()
    expect(page.locator(".compare-runs li")).to_have_count(2)
    expect(page.get_by_role("application", name="Loss over step").first).to_be_visible()
    figures = page.get_by_role("region", name="Results")
    expect(figures.locator("tbody th")).to_have_text(["one", "two"])
    expect(figures).to_contain_text("zero1")


def test_address_contains_page_state(page: Page, server: Server) -> None:
    open_compare(page, server, "one", "two")
    page.get_by_label("time", exact=True).check(force=True)
    page.get_by_label("logarithmic").check(force=True)
    page.get_by_role("button", name="Sort by Steps").click()
    page.get_by_role("button", name="Sort by Steps").click()
    expect(page.get_by_role("region", name="Results").locator("tbody th")).to_have_text(
        ["one", "two"]
    )
    page.get_by_role("button", name="Sort by Steps").click()
    expect(page.get_by_role("region", name="Results").locator("tbody th")).to_have_text(
        ["two", "one"]
    )
    page.get_by_role("button", name="Throughput on the full screen").click()
    parts = ("x=time", "y=tokens_per_second", "scale=log", "sort=steps")
    assert all(part in page.url for part in parts)
    page.reload()
    full = page.get_by_role("dialog", name="Throughput")
    expect(full.get_by_role("application", name="Throughput over time")).to_be_visible()
    box = full.bounding_box()
    assert box is not None
    assert (box["width"], box["height"]) == (1280, 900)
    page.keyboard.press("Escape")
    expect(full).to_have_count(0)
    expect(page).not_to_have_url(re.compile("[?&]y="))
    expect(page.get_by_role("region", name="Results").locator("tbody th")).to_have_text(
        ["two", "one"]
    )


def test_all_metrics_are_shown_and_the_best_value_of_comparable_runs(
    page: Page, server: Server
) -> None:
    open_compare(page, server, "one", "two")
    expect(page.locator("#curves .u-over")).to_have_count(12)
    names = page.locator(".chart-full").evaluate_all(
        "buttons => buttons.map((button) => button.getAttribute('aria-label').split(' on the')[0])"
    )
    assert names == [
        *("Loss", "Evaluation loss", "Learning rate", "Gradient norm", "Throughput", "Samples"),
        *("Step time", "Data wait", "Communication wait", "Memory", "Traffic", "accuracy"),
    ]
    best = page.get_by_role("region", name="Results").locator("td.best")
    expect(best).to_have_text(["0.2250 best", "0.2000 best"])  # of one, which made more steps
    open_compare(page, server, "one", "two", "cluster")
    expect(best).to_have_count(0)
    expect(page.get_by_text("no value is marked as the best")).to_be_visible()


def test_config_differences_are_shown_by_key(page: Page, server: Server) -> None:
    open_compare(page, server, "one", "two")
    table = page.get_by_role("region", name="Config differences")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.locator("tbody tr").locator("th, td")).to_have_text(
        ["train_args.learning_rate", "0.001", "0.002"]
    )
    open_compare(page, server, "one", "older")
    expect(page.get_by_text("The configs are identical.")).to_be_visible()


def test_note_and_tags_are_stored(page: Page, server: Server) -> None:
    open_compare(page, server, "one", "two")
    page.get_by_label("Note on two").fill("the <i>better</i> one")
    page.get_by_label("Tags of two").fill("paper, baseline")
    page.locator(".notes form").nth(1).get_by_role("button", name="Save").click()
    expect(page.locator(".notes form").nth(1).get_by_role("status")).to_contain_text("Saved")
    assert not (server.folder / "two" / ".paceline-ui.json").exists()
    page.goto(server.url.split("?")[0] + "#/?tag=paper")
    expect(page.locator("tr[data-id]")).to_have_count(1)
    expect(page.locator(".run-note")).to_have_text("the <i>better</i> one")


def test_curves_download_as_csv_and_png(page: Page, server: Server, tmp_path: Path) -> None:
    open_compare(page, server, "one", "two")
    expect(page.locator(".u-over").first).to_be_visible()
    with page.expect_download() as download:
        page.locator("#save-csv").click()
    download.value.save_as(tmp_path / "a.csv")
    header, *lines = (tmp_path / "a.csv").read_text().splitlines()
    assert header.startswith("run,step,tokens,time_s,loss")
    assert len(lines) == 70
    assert lines[0].startswith("one,1,4096,")
    assert float(lines[9].split(",")[4]) == 0.9
    page.get_by_role("button", name="Loss on the full screen", exact=True).click()
    with page.expect_download() as download:
        page.locator("#save-png").click()
    download.value.save_as(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_deleted_run_does_not_affect_comparison_of_others(page: Page, server: Server) -> None:
    page.goto(f"{server.url.split('?')[0]}#/compare/{run_id(server.folder, 'one')},000000000000")
    expect(page.locator(".callout-warn")).to_contain_text("000000000000")
    expect(page.locator(".compare-runs li")).to_have_count(1)

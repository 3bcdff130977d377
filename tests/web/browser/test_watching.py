"""Pages that show runs, in a browser: the list, a real run from start to end, every tab, and the
connection to the server."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import event_logs
import made_runs
import pytest
from panel_pages import Server, opened, run_id, serve
from playwright.sync_api import Browser, Page, expect

TRAIN = [
    *(
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#60",
        "split_dataset_ratio=0.2",
        "max_length=64",
    ),
    *(
        "parallel.device=cpu",
        "parallel.num_gpus=1",
        "max_steps=12",
        "logging_steps=1",
        "eval_steps=6",
    ),
    *("evaluation.num_samples=1", "evaluation.max_new_tokens=4"),
]


def rows(page: Page) -> list[str]:
    return page.locator(".run-name a").all_inner_texts()


def test_empty_folder_shows_how_to_start(browser: Browser, tmp_path: Path) -> None:
    server = serve(tmp_path)
    try:
        with opened(browser, server.url) as page:
            expect(page.get_by_role("heading", name=f"No runs in {tmp_path} yet")).to_be_visible()
            expect(page.locator(".command code")).to_contain_text("paceline sft model=")
            expect(page.locator("main a[href='#/new']")).to_be_visible()
            event_logs.finished(tmp_path / "first")
            expect(page.get_by_role("link", name="first")).to_be_visible()
    finally:
        server.stop()


def test_list_search_filter_and_sort(page: Page) -> None:
    expect(page.locator("#runs-count")).to_contain_text("5 runs")
    expect(page.locator("tr[data-id] .badge-done").first).to_have_text("done")
    assert f"named {made_runs.HARM}" in rows(page)
    assert page.locator("main b").count() == 0  # the name of a run is not parsed as markup
    page.fill("#search", "zero1")
    expect(page.locator("tr[data-id]")).to_have_count(1)
    page.fill("#search", "no such run")
    page.get_by_role("button", name="Show all runs").click()
    expect(page.locator("tr[data-id]")).to_have_count(5)
    page.select_option("#status", "failed")
    expect(page.locator("tr[data-id]")).to_have_count(2)
    page.select_option("#status", "")
    page.select_option("#sort", "name")
    assert rows(page) == sorted(rows(page))
    assert "sort=name" in page.url
    assert "token" not in page.url


@pytest.mark.slow
@pytest.mark.soak
def test_real_run_is_followed_to_its_end(page: Page, server: Server) -> None:
    folder = server.folder / "real"
    command = [sys.executable, "-m", "paceline", "sft", *TRAIN, f"output_dir={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page.get_by_role("link", name="real").click(timeout=180_000)
        expect(page.get_by_role("heading", name="real", level=1)).to_be_visible()
        expect(page.locator("[data-key='f.progress']")).to_contain_text(
            re.compile(r"step [1-9]\d* of 12"), timeout=180_000
        )
        expect(page.locator(".badge").first).to_have_text("done", timeout=180_000)
        expect(page.locator("[data-key='f.progress']")).to_contain_text("step 12 of 12")
        expect(page.get_by_role("application", name="Loss over step")).to_be_visible()
        expect(page.locator("[data-key='f.eval_loss'] .figure-value")).to_have_text(
            re.compile(r"^\d\.\d{4}$")
        )
        expect(page.get_by_role("region", name="Events")).to_contain_text("checkpoint")
        page.get_by_role("link", name="Report", exact=True).click()
        expect(
            page.frame_locator("iframe.report").get_by_role("heading", name="real")
        ).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        report = page.frame_locator("iframe.report")
        cell = report.locator("td[data-label='Predicted']").first
        assert cell.evaluate("cell => getComputedStyle(cell).display") == "flex"
        width = "page => page.scrollWidth - page.clientWidth"
        assert report.locator("html").evaluate(width) == 0
        page.set_viewport_size({"width": 1280, "height": 900})
        assert process.wait(60) == 0
        page.locator("#longer").click()
        page.fill("#longer-steps", "2")
        expect(page.locator("#longer-rate")).to_contain_text("The run ends at step 14.")
        page.locator("#dialog-yes").click()
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("[data-key='f.progress']")).to_contain_text(
            "step 14 of 14", timeout=180_000
        )
        expect(page.locator(".badge").first).to_have_text("done", timeout=180_000)
        expect(page.locator(".badge")).to_have_count(1)  # no restart after a fault
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def live(server: Server) -> Iterator[Path]:
    folder = server.folder / "live one"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_new_events_appear_live(page: Page, server: Server, live: Path) -> None:
    log = event_logs.begin(live, steps=100)
    page.get_by_role("link", name="live one").click()
    expect(page.locator(".badge").first).to_have_text("live")
    expect(page.get_by_role("heading", name="No steps yet")).to_be_visible()
    event_logs.emit_steps(log, 1, 10)
    expect(page.locator("[data-key='f.loss'] .figure-value")).to_have_text("0.9000")
    chart = page.get_by_role("application", name="Loss over step")
    expect(chart).to_have_attribute("aria-label", re.compile("ends at 0.9000"))
    event_logs.emit_steps(log, 11, 20)
    expect(chart).to_have_attribute("aria-label", re.compile("ends at 0.4500"))
    log.emit(
        {
            "type": "fault",
            "step": 20,
            "ranks": [1],
            "hosts": ["one"],
            "reason": "rank 1 was killed",
            "restart": 1,
        }
    )
    expect(page.get_by_role("region", name="Events")).to_contain_text("rank 1 was killed")
    # steps after step 10 no longer count
    log.emit({"type": "resume", "step": 10, "path": "checkpoints/step-00000010"})
    event_logs.emit_steps(log, 11, 12)
    expect(chart).to_have_attribute("aria-label", re.compile("ends at 0.7500"))
    log.close()
    shutil.rmtree(live)
    expect(page.get_by_role("heading", name="This run no longer exists")).to_be_visible()


def open_tab(page: Page, server: Server, name: str, tab: str) -> None:
    page.goto(f"{server.url.split('?')[0]}#/run/{run_id(server.folder, name)}/{tab}")
    expect(page.locator(f"[data-tab='{tab}']")).to_have_attribute("aria-current", "page")


def test_tabs_of_run_with_16_ranks(page: Page, server: Server) -> None:
    open_tab(page, server, "cluster", "ranks")
    expect(page.locator(".callout-warn")).to_contain_text("Rank 5 is the slowest")
    count_colors = (
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((_, at)"
        " => at % 4 === 0)).size"
    )
    assert page.locator("canvas.timeline").evaluate(count_colors) > 20
    expect(page.locator("tbody tr")).to_have_count(16)
    expect(page.locator("tbody tr").first).to_contain_text("90 % · 61 °C · 402 W")
    page.locator("canvas.timeline").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".chart-wrap [role=status]")).to_contain_text("Rank 0, step")
    open_tab(page, server, "cluster", "traffic")
    expect(page.get_by_role("region", name="Collectives")).to_contain_text("reduce_scatter")
    open_tab(page, server, "cluster", "memory")
    expect(page.get_by_role("region", name="Values").locator("tbody tr")).to_have_count(17)
    open_tab(page, server, "cluster", "world")
    expect(page.locator("svg.mesh .mesh-rank")).to_have_count(16)
    expect(page.locator("svg.mesh .mesh-host")).to_have_count(2)
    expect(page.get_by_role("region", name="Communication groups")).to_contain_text("{0, 2}")
    open_tab(page, server, "cluster", "samples")
    expect(page.locator(".sample-text")).to_have_text(f"It writes {made_runs.HOSTILE} as text.")
    open_tab(page, server, "cluster", "log")
    expect(page.locator(".log-error").first).to_contain_text(made_runs.HOSTILE)
    open_tab(page, server, "cluster", "config")
    expect(page.locator("pre.code")).to_contain_text("builtin:qwen2-micro")
    open_tab(page, server, "cluster", "checkpoints")
    expect(page.locator("tbody tr")).to_contain_text("3 GiB")
    open_tab(page, server, "cluster", "report")
    expect(page.get_by_role("heading", name="No report")).to_be_visible()
    assert page.locator("main img").count() == 0


def test_older_run_names_data_not_recorded(page: Page, server: Server) -> None:
    for tab, what in {
        "ranks": "Time of each rank",
        "memory": "Memory",
        "world": "Mesh",
        "samples": "Samples",
    }.items():
        open_tab(page, server, "older", tab)
        expect(
            page.get_by_role("heading", name=f"{what}: not recorded by this run")
        ).to_be_visible()
    open_tab(page, server, "older", "overview")
    # loss, learning rate, throughput, step time; no empty chart
    expect(page.get_by_role("application")).to_have_count(4)
    # A run that has ended has no figure without a value, and no chart is alone in a row.
    expect(page.locator("[data-key='f.eval_loss'], [data-key='f.epoch']")).to_have_count(0)
    widths = page.locator(".charts > *").evaluate_all(
        "cards => cards.map((card) => Math.round(card.getBoundingClientRect().width))"
    )
    assert len(set(widths)) == 1


def test_zoom_requests_range_from_server(page: Page, server: Server) -> None:
    open_tab(page, server, "cluster", "overview")
    chart = page.get_by_role("application", name="Loss over step")
    plot = chart.locator(".u-over")
    box = plot.bounding_box()
    assert box is not None
    with page.expect_request(re.compile(r"/series\?.*start=\d+&end=\d+")):
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        page.mouse.up()
    expect(page.locator("#from-step")).to_have_value("51")
    # With the keyboard. The first step of the range stays selected when the data changes.
    chart.focus()
    for key in ("Home", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("button", name="Full run").click()
    expect(page.locator("#from-step")).to_have_value("")
    chart.focus()
    page.keyboard.press("Home")
    feedback = chart.locator("xpath=..").get_by_role("status")
    for _ in range(500):
        if feedback.inner_text().startswith("step 1:"):
            break
        page.wait_for_timeout(20)  # until the full run has arrived
        page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    with page.expect_request(re.compile(r"/series\?.*start=11&end=51")):
        page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("start=11&end=51"))
    page.reload()
    expect(page.locator("#to-step")).to_have_value("51")


@pytest.mark.soak
def test_page_reconnects_after_server_restart(browser: Browser, tmp_path: Path) -> None:
    event_logs.finished(tmp_path / "before")
    server = serve(tmp_path)
    with opened(browser, server.url) as page:
        expect(page.get_by_role("link", name="before")).to_be_visible()
        server.stop()
        expect(page.locator(".banner")).to_contain_text("Connection to the server lost")
        event_logs.finished(tmp_path / "after")
        again = serve(tmp_path, server.port)
        try:
            page.get_by_role("button", name="Retry now").click()
            expect(page.locator(".banner")).to_have_count(0)
            expect(page.get_by_role("link", name="after")).to_be_visible()
        finally:
            again.stop()

"""The pages that commands write are in the language of the browser, and in the panel in its
language: on a screen and on a phone."""

from pathlib import Path

import event_logs
import made_runs
import pytest
from panel_pages import english_texts, opened, run_id, serve
from playwright.sync_api import Browser, expect

from paceline.bench.collectives import CostModel, Timing
from paceline.bench.page import render
from paceline.core.event_log import read_events
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.explain.catalog import ExplainOptions
from paceline.explain.page import render_page
from paceline.explain.run import record
from paceline.observe.report.html import render_report

WIDTHS = pytest.mark.parametrize("width", [390, 1440])


def write_report(root: Path) -> Path:
    """Write the report of a run with a notice that has a Chinese text, and one that has none."""
    log = event_logs.begin(root)
    event_logs.emit_steps(log, 1, 12)
    cut = UserText("{truncated} samples truncated", code="samples-truncated", truncated=4, limit=8)
    log.notice(cut, "warning")
    log.notice("a notice of an older version", "warning")
    log.close()
    report = {"status": "done", "first_train_loss": 3.0, "final_train_loss": 1.0, "steps": 12}
    report |= {"world_size": 2, "device": "cpu", "data": {"read": 9, "kept": 8, "dropped": {}}}
    page = render_report(report, read_events(RunDir(root).events), "model: m\n")
    RunDir(root).report_html.write_text(page, encoding="utf-8")
    return RunDir(root).report_html


@WIDTHS
def test_report(browser: Browser, tmp_path: Path, width: int) -> None:
    path = write_report(tmp_path / "one")
    size = {"width": width, "height": 900}
    with opened(browser, path.as_uri(), viewport=size, locale="zh-CN") as page:
        expect(page.get_by_text("Paceline 报告")).to_be_visible()
        expect(page.get_by_text("4 个样本被截断到 max_length 8")).to_be_visible()
        expect(page.get_by_text("a notice of an older version（英文）")).to_be_visible()
        expect(page.get_by_text("cpu 上 2 个 rank")).to_be_visible()
        page.locator(".area-box").first.hover()
        expect(page.locator(".tip").first).to_contain_text("平滑后")
        assert english_texts(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with opened(browser, path.as_uri(), viewport=size) as page:
        expect(page.get_by_text("Paceline report")).to_be_visible()
        expect(page.get_by_text("4 samples truncated")).to_be_visible()
        assert "英文" not in page.inner_text("body")


def test_report_follows_the_panel(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path / "one")
    server = serve(tmp_path)
    try:
        url = f"{server.url}#/run/{run_id(tmp_path, 'one')}/report"
        with opened(browser, url, locale="en-GB") as page:
            report = page.frame_locator("iframe.report")
            expect(report.get_by_text("Paceline report")).to_be_visible()
            page.click("#language")
            expect(report.get_by_text("Paceline 报告")).to_be_visible()
    finally:
        server.stop()


@WIDTHS
def test_sweep(browser: Browser, tmp_path: Path, width: int) -> None:
    path = made_runs.sweep(tmp_path / "sweep").folder / "sweep.html"
    size = {"width": width, "height": 900}
    with opened(browser, path.as_uri(), viewport=size, locale="zh-CN") as page:
        expect(page.get_by_text("Paceline 扫参")).to_be_visible()
        expect(page.get_by_text("6 个已完成")).to_be_visible()
        expect(page.get_by_text("参数的重要性")).to_be_visible()
        assert english_texts(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def timings() -> list[Timing]:
    """Return the times of an all-reduce by two algorithms."""
    return [
        {
            "collective": "all-reduce",
            "algorithm": algorithm,
            "world_size": 2,
            "bytes": size,
            "latency_s": size * 1e-9,
            "bus_bandwidth_bytes_s": 1e9,
        }
        for algorithm in ("native", "ring")
        for size in (1 << 10, 1 << 20)
    ]  # type: ignore[typeddict-item]


@WIDTHS
def test_collectives(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "collectives.html"
    models: list[CostModel] = []
    path.write_text(render(timings(), models), encoding="utf-8")
    size = {"width": width, "height": 900}
    with opened(browser, path.as_uri(), viewport=size, locale="zh-CN") as page:
        expect(page.locator("h2 [lang='zh-CN']")).to_be_visible()
        expect(page.get_by_role("img", name="用时与大小的关系")).to_be_visible()
        assert english_texts(page) == []


@pytest.mark.soak
@WIDTHS
@pytest.mark.parametrize("topic", ["all-reduce", "ddp", "tensor"])
def test_player(browser: Browser, tmp_path: Path, topic: str, width: int) -> None:
    algorithm, elements = ("ring", 8) if topic == "all-reduce" else ("", 0)
    path = tmp_path / "player.html"
    path.write_text(render_page(record(ExplainOptions(topic, 2, elements, algorithm))), "utf-8")
    size = {"width": width, "height": 900}
    with opened(browser, path.as_uri(), viewport=size, locale="zh-CN") as page:
        play = page.get_by_role("button", name="▶ 播放")
        expect(play).to_be_visible()
        last = int(page.locator("#seek").get_attribute("max") or 0)
        for number in range(last + 1):
            expect(page.locator("#place")).to_have_text(f"{number} / {last}")
            assert english_texts(page) == []
            page.keyboard.press("ArrowRight")
        play.click()
        expect(page.get_by_role("button", name="‖ 暂停")).to_be_visible()
    with opened(browser, path.as_uri(), viewport=size) as page:
        expect(page.get_by_role("button", name="▶ Play")).to_be_visible()

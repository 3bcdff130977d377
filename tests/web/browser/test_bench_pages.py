"""Test the page of `paceline bench scaling` in a browser."""

from pathlib import Path

import pytest
from panel_pages import english_texts, opened
from playwright.sync_api import Browser, expect

from paceline.bench.scaling import PredictedRow, ScalingReport, ScalingRow
from paceline.bench.scaling_page import render


def _row(ranks: int, efficiency: float) -> ScalingRow:
    return {
        "scaling": "weak",
        "ranks": ranks,
        "oversubscribed": ranks > 2,
        "global_batch_size": 8 * ranks,
        "micro_batches_per_rank": 1,
        "step_time_s": 1 / efficiency,
        "step_time_interval_s": None,
        "work_per_second": 1000.0,
        "speedup": ranks * efficiency,
        "ideal_speedup": float(ranks),
        "efficiency": efficiency,
        "efficiency_interval": [efficiency - 0.05, efficiency + 0.05],
        "parts": {"computation_s": 0.8, "communication_s": 0.1, "waiting_s": 0.05, "other_s": 0.05},
        "peak_memory_bytes": 1 << 30,
    }


def _report() -> ScalingReport:
    prediction: PredictedRow = {
        "scaling": "weak",
        "ranks": 8,
        "step_time_s": 1.4,
        "speedup": 5.6,
        "efficiency": 0.7,
        "efficiency_interval": [0.6, 0.8],
    }
    return {
        "model": "builtin:qwen2-tiny",
        "strategy": "ddp",
        "device": "cpu",
        "units": 2,
        "threads_per_rank": 1,
        "unit": "tokens",
        "steps": 10,
        "repeats": 3,
        "rows": [_row(1, 1.0), _row(2, 0.9), _row(4, 0.4)],
        "fit": {
            "terms": {"micro_batch_s": 1.0, "transfer_s": 0.1},
            "residual": 0.02,
            "predictions": [prediction],
        },
    }


@pytest.mark.soak
@pytest.mark.parametrize("width", [390, 1200])
def test_charts_and_tables_are_visible(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "scaling.html"
    path.write_text(render(_report()), encoding="utf-8")
    with opened(browser, path.as_uri(), viewport={"width": width, "height": 900}) as page:
        expect(page.get_by_role("img", name="Efficiency by number of ranks")).to_be_visible()
        expect(page.get_by_text("ideal").first).to_be_visible()
        expect(page.get_by_role("cell", name="4 ranks *")).to_be_visible()
        # Only the tables scroll, not the page.
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        bars = page.locator(".bar > div")
        assert bars.count() == 3
        for bar in bars.all():
            widths = bar.locator("i").evaluate_all("all => all.map(one => one.offsetWidth)")
            assert sum(widths) == pytest.approx(bar.bounding_box()["width"], abs=4)


def test_page_is_in_chinese(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "scaling.html"
    path.write_text(render(_report()), encoding="utf-8")
    with opened(browser, path.as_uri(), locale="zh-CN") as page:
        expect(page.get_by_role("img", name="效率与 rank 数的关系")).to_be_visible()
        expect(page.get_by_role("cell", name="4 个 rank *")).to_be_visible()
        expect(page.get_by_text("弱扩展：每个 rank 的批次不变")).to_be_visible()
        assert english_texts(page) == []

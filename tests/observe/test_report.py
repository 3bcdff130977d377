"""`report.json` and `report.html`: the fixed keys, and a page that is complete, escaped and usable
offline for every kind of run."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.core.event_log import EventLog, read_events
from paceline.core.report import REPORT_KEYS
from paceline.core.run_dir import RunDir
from paceline.observe.report.axes import tick_label, ticks
from paceline.observe.report.charts import (
    MAX_POINTS,
    Plot,
    Series,
    downsample,
    draw,
    smooth,
)
from paceline.observe.report.html import render_report, write_reports

HTML_INJECTION = "</script><script>alert('x')</script><img src=x onerror=\"alert(1)\">"
VOID_ELEMENTS = {"meta", "br", "img", "line", "path", "input", "hr", "link"}


def make_report(**fields: object) -> dict:
    """Return a report with all keys."""
    defaults = {
        "status": "done",
        "strategy": "ddp",
        "world_size": 2,
        "device": "cpu",
        "steps": 30,
        "epochs": 1.5,
        "samples_seen": 480,
        "train_tokens": 96_000,
        "label_tokens": 50_000,
        "tokens_per_second": 9_420.0,
        "time_to_first_step_s": 3.81,
        "wall_s": 139.2,
        "first_train_loss": 3.5,
        "final_train_loss": 0.93,
        "final_eval_loss": 1.1,
        "peak_memory_bytes": [2**30, 2**29],
        "state_memory_bytes": {"predicted": 2**20, "measured": 2**20},
        "traffic_bytes_per_step": {"predicted": 100, "measured": None},
        "step_time_s": {
            "predicted": 0.5,
            "measured": 0.4,
            "measured_steps": 29,
            "range": None,
            "parts": None,
        },
        "restarts": 0,
        "resumed_from_step": None,
        "data": {"read": 500, "kept": 480, "truncated": 3, "dropped": {"empty": 20}},
    }
    return {**defaults, **fields}


def log_run(
    root: Path,
    num_steps: int,
    world: int = 2,
    losses: dict | None = None,
    name: str = "builtin:small",
) -> EventLog:
    """Write the events of a run of ``num_steps`` steps."""
    root.mkdir(parents=True, exist_ok=True)
    RunDir(root).config.write_text("model: builtin:small\ntask: sft\n")
    log = EventLog(RunDir(root).events)
    log_start(log, root, name)
    log_steps(log, 1, num_steps, world, losses or {})
    return log


def log_start(
    log: EventLog, root: Path, name: str = "builtin:small", resumed: int | None = None
) -> None:
    log.emit(
        {
            "type": "run_start",
            "config": {"task": "sft"},
            "derived": {"global_batch_size": 16},
            "world_size": 2,
            "device": "cpu",
            "strategy": "ddp",
            "model": {"name": name, "parameters": 1000, "trainable_parameters": 10},
            "data": {},
            "versions": {"torch": "2.11"},
            "output_dir": str(root),
            "resumed_from_step": resumed,
        }
    )


def log_steps(
    log: EventLog, first: int, last: int, world: int = 2, losses: dict | None = None
) -> None:
    for step in range(first, last + 1):
        log.emit(
            {
                "type": "step",
                "step": step,
                "epoch": step / 20,
                "loss": (losses or {}).get(step, 3 / step),
                "grad_norm": 0.5,
                "learning_rate": 1e-4,
                "tokens": 3200,
                "step_time_s": 0.3,
                "data_wait_s": 0.01,
                "comm_wait_s": 0.02,
                "memory_bytes": [2**30] * world,
                "ranks": [{"rank": rank, "data_wait_s": 0.01} for rank in range(world)],
            }
        )
        if step % 10 == 0:
            log.emit(
                {
                    "type": "eval",
                    "step": step,
                    "loss": 1.0,
                    "count": 5,
                    "wall_s": 0.1,
                    "metrics": {},
                }
            )


def write_page(root: Path, **fields: object) -> str:
    write_reports(RunDir(root), make_report(**fields))
    return RunDir(root).report_html.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Checks that elements are nested correctly, and collects tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID_ELEMENTS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open_tags, f"</{tag}> without a start tag"
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def find_paths(html: str) -> list[str]:
    return re.findall(r'<path class="([^"]*)" d="([^"]*)"', html)


def test_report_json_has_fixed_keys_and_no_nan(tmp_path):
    log_run(tmp_path, 3)
    write_reports(
        RunDir(tmp_path),
        make_report(final_train_loss=math.nan, final_eval_loss=None, samples_per_second=3.0),
    )
    loaded = json.loads(
        RunDir(tmp_path).report.read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert set(REPORT_KEYS) <= set(loaded)
    assert loaded["final_train_loss"] == "nan"
    assert loaded["final_eval_loss"] is None
    assert loaded["data"]["dropped"] == {"empty": 20}
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other": 1}, "unknown other"),
        ({"data": {"read": 1, "kept": 1}}, "missing data.dropped"),
        (
            {"state_memory_bytes": {"predicted": 1, "measured": 1, "guess": 2}},
            "unknown state_memory_bytes.guess",
        ),
    ],
)
def test_rejects_report_with_wrong_keys(tmp_path, change, message):
    with pytest.raises(KeyError, match=message):
        write_reports(RunDir(tmp_path), make_report(**change))
    assert not RunDir(tmp_path).report.exists()


def test_error_lists_every_missing_key(tmp_path):
    incomplete_report = make_report()
    del incomplete_report["restarts"], incomplete_report["wall_s"]
    with pytest.raises(KeyError, match="missing wall_s; missing restarts"):
        write_reports(RunDir(tmp_path), incomplete_report)


def test_page_is_self_contained_and_has_all_plots(tmp_path):
    log_run(tmp_path, 30)
    html = write_page(tmp_path)
    page = Page(html)
    assert "http" not in html
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "prefers-color-scheme: dark" in html
    for title in (
        "Training loss",
        "Learning rate",
        "Throughput",
        "Time per step",
        "Memory of each rank",
        "Gradient norm",
    ):
        assert title in page.text
    assert page.tags.count("svg") == 6
    assert all(d for _, d in find_paths(html))
    for part in (
        "0.9300",
        "from 3.5000",
        "2 min 19 s",
        "1.0 GiB",
        "dropped: empty",
        "480",
        "96.0 %",
        "task: sft",
        "2.11",
    ):
        assert part in page.text


def test_data_of_every_plot_is_valid_json(tmp_path):
    log_run(tmp_path, 30)
    blocks = re.findall(
        r'<script type="application/json">(.*?)</script>', write_page(tmp_path), re.DOTALL
    )
    assert len(blocks) == 6
    loss = json.loads(blocks[0])
    assert [series["name"] for series in loss["series"]] == ["each step", "smoothed", "evaluation"]
    assert loss["series"][0]["y"][1] == 1.5
    assert loss["series"][2]["x"] == [10, 20, 30]


def test_values_from_configs_and_data_are_escaped(tmp_path):
    log = log_run(tmp_path / "x<b>y", 12, name=HTML_INJECTION)
    log.notice(HTML_INJECTION, "warning")
    log.emit(
        {
            "type": "checkpoint",
            "step": 3,
            "path": None,
            "size_bytes": None,
            "wall_s": None,
            "error": HTML_INJECTION,
        }
    )
    log.emit({"type": "run_end", "status": "failed", "step": 3, "reason": HTML_INJECTION})
    RunDir(tmp_path / "x<b>y").config.write_text(f"model: '{HTML_INJECTION}'\n")
    data = {"read": 1, "kept": 0, "dropped": {HTML_INJECTION: 1}}
    html = write_page(
        tmp_path / "x<b>y",
        status="failed",
        strategy=HTML_INJECTION,
        device=HTML_INJECTION,
        data=data,
        final_eval_metrics={HTML_INJECTION: 0.5},
    )
    page = Page(html)
    assert page.tags.count("script") == 8  # the data of six plots, and two scripts of the page
    assert "img" not in page.tags
    assert "onerror" not in {name for name, _ in page.attributes}
    assert page.text.count("alert(1)") >= 8


def test_report_without_steps(tmp_path):
    log_run(tmp_path, 0)
    empty_report = dict.fromkeys(REPORT_KEYS)
    html = render_report(empty_report, read_events(RunDir(tmp_path).events), "")
    assert "nothing to plot" in Page(html).text
    Page(render_report(empty_report, [], ""))


def test_single_step_is_drawn_as_dot(tmp_path):
    log_run(tmp_path, 1)
    html = write_page(tmp_path)
    Page(html)
    assert any(re.fullmatch(r"M[\d.]+ [\d.]+h0", d) for _, d in find_paths(html))


def test_nonfinite_losses_are_gaps_with_note(tmp_path):
    log_run(tmp_path, 30, losses={7: math.nan, 8: math.inf, 15: -math.inf})
    html = write_page(tmp_path, final_train_loss=math.nan)
    raw = next(d for kind, d in find_paths(html) if "faint" in kind)
    assert raw.count("M") == 3
    assert "nan" not in raw
    assert "the loss of 3 of 30 logged steps is not finite" in Page(html).text
    assert "NaN" not in "".join(re.findall(r"application/json\">(.*?)</script>", html, re.DOTALL))


def test_report_with_only_nan_losses(tmp_path):
    log_run(tmp_path, 3, losses=dict.fromkeys((1, 2, 3), math.nan))
    text = Page(write_page(tmp_path)).text
    assert "the loss of 3 of 3 logged steps is not finite" in text


def test_plots_of_unknown_metrics_are_omitted(tmp_path):
    log = EventLog(RunDir(tmp_path).events)
    for step in (1, 2, 3):
        log.emit(
            {
                "type": "step",
                "step": step,
                "epoch": None,
                "loss": 1.0,
                "grad_norm": None,
                "learning_rate": None,
                "tokens": None,
                "step_time_s": None,
                "data_wait_s": None,
                "comm_wait_s": None,
                "memory_bytes": None,
                "ranks": None,
            }
        )
    page = Page(write_page(tmp_path))
    assert page.tags.count("svg") == 1
    assert "–" in page.text


def test_later_attempt_replaces_steps_and_is_marked(tmp_path):
    log = log_run(tmp_path, 25)
    log_start(log, tmp_path, resumed=15)
    log.emit({"type": "resume", "step": 15, "path": "checkpoints/step-00000015"})
    log_steps(log, 16, 30, losses={16: 9.0})
    html = write_page(tmp_path, resumed_from_step=15)
    text = Page(html).text
    loss = json.loads(re.search(r'application/json">(.*?)</script>', html, re.DOTALL)[1])
    assert loss["series"][0]["x"] == list(range(1, 31))
    assert loss["series"][0]["y"][15] == 9.0
    assert loss["series"][2]["x"] == [10, 20, 30]
    assert text.count("resumed at step 15") == 1
    assert html.count('<line class="mark"') == 6
    assert "no report" in text  # of the first attempt


def test_tables_show_time_and_memory_by_category(tmp_path):
    phases = {"data_s": 0.004, "forward_s": 0.0621, "communication_s": 1.5, "other_s": 0.0}
    ranks = [
        {"rank": 0, "data_wait_s": 0.1, "comm_wait_s": 0.2, **phases, "memory_bytes": 3 * 2**30}
    ]
    state = {
        "parameters": 2**20,
        "gradients": 2**21,
        "optimizer": 2**22,
        "activations": None,
        "total": 7 * 2**20,
    }
    predicted = {"memory_bytes": {**state, "activations": 5 * 2**20, "total": 12 * 2**20}}
    log = EventLog(RunDir(tmp_path).events)
    log.emit({"type": "run_start", "config": {}, "predicted": predicted})
    log.emit({"type": "step", "step": 1, "loss": 1.0, "step_time_s": 1.6, "ranks": ranks})
    log.emit({"type": "memory", "step": 2, "ranks": [state]})
    log.close()
    text = write_page(tmp_path)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text[text.index("Ranks at step 1") :])
    assert cells[:6] == ["0", "4.0 ms", "62.1 ms", "1.5 s", "0.0 ms", "3.0 GiB"]
    assert "data_wait_s" not in text
    assert "communication, not hidden" in text
    memory = re.findall(r"<td[^>]*>(?:<span[^>]*>)?([^<]*)<", text[text.index("Memory by rank") :])
    assert memory[:6] == [
        "predicted maximum",
        "1.0 MiB",
        "2.0 MiB",
        "4.0 MiB",
        "5.0 MiB",
        "12.0 MiB",
    ]
    assert memory[6:12] == ["rank 0", "1.0 MiB", "2.0 MiB", "4.0 MiB", "–", "7.0 MiB"]


def test_run_of_older_version_has_no_memory_table(tmp_path):
    log = EventLog(RunDir(tmp_path).events)
    log.emit({"type": "run_start", "config": {}})
    log_steps(log, 1, 3)
    log.close()
    text = write_page(tmp_path)
    assert "Memory by rank" not in text
    assert "data_wait_s" in text


def test_many_ranks_are_summarized(tmp_path):
    log_run(tmp_path, 3, world=12)
    text = Page(write_page(tmp_path)).text
    assert "Memory, 12 ranks" in text
    assert "maximum" in text


def test_large_run_is_downsampled_but_keeps_spike(tmp_path):
    events = [
        {
            "type": "step",
            "time": 0.0,
            "step": n,
            "loss": 50.0 if n == 7777 else 1.0,
            "step_time_s": 0.1,
            "tokens": 1,
            "data_wait_s": 0.01,
        }
        for n in range(1, 20_001)
    ]
    html = render_report(make_report(), events, "")
    blocks = [
        json.loads(text)
        for text in re.findall(r'application/json">(.*?)</script>', html, re.DOTALL)
    ]
    assert all(
        sum(len(series["x"]) for series in block["series"]) <= MAX_POINTS for block in blocks
    )
    assert max(blocks[0]["series"][0]["y"]) == 50.0
    assert len(html) < 400_000


def test_downsample_keeps_extremes_endpoints_and_gaps():
    points = [(float(x), math.sin(x / 50)) for x in range(5000)]
    points[1234] = (1234.0, 9.0)
    points[2345] = (2345.0, -9.0)
    points[3456] = (3456.0, None)
    reduced = downsample(points, 300)
    assert len(reduced) <= 300
    assert reduced[0] == points[0]
    assert reduced[-1] == points[-1]
    assert {points[1234], points[2345], points[3456]} <= set(reduced)
    assert [x for x, _ in reduced] == sorted(x for x, _ in reduced)
    assert downsample(points[:10], 300) == points[:10]


def test_smooth_preserves_constants_lines_and_gaps():
    assert smooth([(1, 2.0), (2, None), (3, 2.0)]) == [(1, 2.0), (2, None), (3, 2.0)]
    line = [(x, float(x)) for x in range(40)]
    assert [y for _, y in smooth(line)] == pytest.approx([y for _, y in line])


def test_ticks_are_round_and_within_range():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1, 3, integers=True) == [1, 2, 3]
    assert ticks(5.0, 5.0) == [5.0]
    assert [tick_label(value, 0.5) for value in (0, 0.5, 1.0)] == ["0", "0.5", "1.0"]
    assert [tick_label(value, 5e-5) for value in (5e-5, 1e-4)] == ["5e-5", "1e-4"]
    assert tick_label(15_000, 5_000) == "15k"


def test_stacked_areas_are_added():
    plot = Plot(
        "t",
        "s",
        [
            Series("a", [(1, 1.0), (2, 1.0)], kind="area"),
            Series("b", [(1, 3.0), (2, 3.0)], "c2", "area"),
        ],
    )
    shapes = draw(plot, (1, 2), [])["shapes"]
    upper_edge = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", shapes[1].d)]
    lower_edge = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", shapes[0].d)]
    assert upper_edge[2:] == lower_edge[:2]  # the lower edge of b is the upper edge of a
    assert (400 - upper_edge[0]) == pytest.approx(4 * (400 - lower_edge[0]), rel=1e-3)

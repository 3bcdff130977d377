"""Test `paceline bench scaling`: fit, intervals, parts of a step, page, and real runs."""

import json
from pathlib import Path

import pytest
from commands import MICRO, parse, run
from raised import raises_error
from short_run_figures import short_run

from paceline.bench.intervals import estimate, geometric_estimate
from paceline.bench.scaling import (
    Runs,
    ScalingCase,
    ScalingOptions,
    ScalingReport,
    Units,
    cases_of,
    default_predictions,
    make_report,
    measure_scaling,
    threads_per_rank,
)
from paceline.bench.scaling_fit import Point, fit_model
from paceline.bench.scaling_page import render
from paceline.bench.scaling_text import interval_text
from paceline.bench.short_runs import RunLength, StepParts, figures_of, short_config, split_step
from paceline.commands.bench_scaling import BUILTIN, make_options, scaling_tables
from paceline.commands.options import load_job_config
from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.train.run_spec import TrainResult

_LENGTH = RunLength(steps=4, warm_up=1)


def _config(**train_args: object) -> Config:
    return Config.model_validate(
        {"model": "<b>model</b>", "dataset": "data.jsonl", "train_args": train_args}
    )


def _seconds(ranks: int, micro_batches: float) -> float:
    """Return the time of a step by a model with known seconds of each term."""
    return 0.2 * micro_batches + 0.03 * 2 * (ranks - 1) / ranks + 0.05 + 0.004 * (ranks - 1)


def _runs(options: ScalingOptions, config: Config) -> Runs:
    """Return runs that take as long as :func:`_seconds` says, and with more ranks than cores ten
    times as long."""
    parts = StepParts(0.6, 0.2, 0.1, 0.1)
    runs: Runs = {}
    for case in cases_of(config, options):
        seconds = _seconds(case.ranks, case.micro_batches) * (10 if case.ranks > 4 else 1)
        work = 100.0 * case.ranks * case.micro_batches
        runs[case] = [short_run(seconds, work=work, parts=parts)] * options.repeats
    return runs


def _report() -> ScalingReport:
    options, config = ScalingOptions((1, 2, 4, 8), _LENGTH), _config()
    return make_report(config, options, Units("cpu", 4), 1, _runs(options, config))


def test_fit_recovers_a_known_model() -> None:
    points = [
        Point(ranks, micro_batches, _seconds(ranks, micro_batches))
        for ranks in (1, 2, 3, 4)
        for micro_batches in (1, 3)
    ]
    model = fit_model(points)
    assert model is not None
    assert model.seconds == pytest.approx(
        {"micro_batch_s": 0.2, "transfer_s": 0.03, "update_s": 0.05, "rank_s": 0.004}
    )
    assert model.residual == pytest.approx(0, abs=1e-9)
    assert model.time_s(64, 1) == pytest.approx(_seconds(64, 1))


def test_fit_with_few_points_has_fewer_terms() -> None:
    two = fit_model([Point(1, 1, 1.0), Point(2, 1, 1.5)])
    assert two is not None
    assert two.seconds == pytest.approx({"micro_batch_s": 1.0, "transfer_s": 0.5})
    assert two.residual is None
    assert fit_model([Point(2, 1, 1.0), Point(2, 2, 2.0)]) is None


def test_fit_has_no_negative_terms() -> None:
    model = fit_model([Point(1, 1, 1.0), Point(2, 1, 0.8)])  # faster by chance
    assert model is not None
    assert model.seconds["transfer_s"] == 0


def test_efficiency_of_an_ideal_machine_is_1() -> None:
    model = fit_model([Point(1, 4, 4.0), Point(2, 2, 2.0), Point(2, 4, 4.0)])
    assert model is not None
    assert model.efficiency("weak", 16, 1, 4) == pytest.approx(1)
    assert model.efficiency("strong", 16, 1, 4) == pytest.approx(1)
    assert model.speedup(16, 1, 4) == pytest.approx(16)


def test_interval_is_that_of_students_t() -> None:
    result = estimate([1.0, 2.0, 3.0])
    assert result.mean == 2.0
    assert result.limits == pytest.approx([2 - 2.4841, 2 + 2.4841], abs=1e-4)
    assert estimate([1.0]).limits is None
    trimmed = estimate([3.0, 1.0, 9.0, 2.0, -40.0], trim=0.2)
    assert trimmed.mean == 2.0
    # winsorized: 1, 1, 2, 3, 3; two degrees of freedom
    error = (4 / (3 * 2)) ** 0.5
    assert trimmed.limits == pytest.approx([2 - 4.3027 * error, 2 + 4.3027 * error], abs=1e-4)
    ratio, inverse = geometric_estimate([0.5, 0.6, 0.4]), geometric_estimate([2.0, 1 / 0.6, 2.5])
    assert ratio.low is not None
    assert inverse.high is not None
    assert inverse.mean == pytest.approx(1 / ratio.mean)
    assert inverse.high == pytest.approx(1 / ratio.low)


def test_wide_interval_is_called_noise() -> None:
    assert interval_text([0.9, 0.97]) == "90 to 97 %"
    assert interval_text([0.51, 1.49]) == "51 to 149 %"
    assert interval_text([0.4, 1.6]) == "too noisy: more repeats"
    assert interval_text(None) == "–"


def test_report_leaves_oversubscribed_ranks_out_of_the_fit() -> None:
    report = _report()
    oversubscribed = [row["ranks"] for row in report["rows"] if row["oversubscribed"]]
    assert oversubscribed == [8, 8]
    assert report["fit"] is not None
    assert report["fit"]["terms"]["micro_batch_s"] == pytest.approx(0.2)
    predicted = {(row["scaling"], row["ranks"]): row for row in report["fit"]["predictions"]}
    assert [ranks for kind, ranks in predicted if kind == "weak"] == [8, 16, 32]
    assert predicted["weak", 8]["step_time_s"] == pytest.approx(_seconds(8, 1))
    assert predicted["weak", 8]["efficiency"] == pytest.approx(_seconds(1, 1) / _seconds(8, 1))
    strong = _seconds(1, 8) / _seconds(16, 0.5) / 16
    assert predicted["strong", 16]["efficiency"] == pytest.approx(strong)


def test_report_compares_with_the_fewest_ranks() -> None:
    rows = {(row["scaling"], row["ranks"]): row for row in _report()["rows"]}
    assert rows["weak", 1]["efficiency"] == pytest.approx(1)
    assert rows["weak", 1]["efficiency_interval"] is None
    assert rows["weak", 4]["efficiency"] == pytest.approx(_seconds(1, 1) / _seconds(4, 1))
    assert rows["strong", 4]["speedup"] == pytest.approx(_seconds(1, 8) / _seconds(4, 2))
    assert rows["strong", 4]["ideal_speedup"] == 4
    assert rows["strong", 4]["work_per_second"] == pytest.approx(800 / _seconds(4, 2))


def test_ranks_without_an_accelerator_have_no_figures() -> None:
    options, config = ScalingOptions((1, 2, 4), _LENGTH, kinds=("weak",)), _config()
    runs = {case: runs for case, runs in _runs(options, config).items() if case.ranks <= 2}
    report = make_report(config, options, Units("cuda", 2), None, runs)
    last = report["rows"][-1]
    assert last["oversubscribed"]
    assert last["step_time_s"] is None
    assert last["efficiency"] is None
    assert report["fit"] is not None
    json.dumps(report)
    assert "–" in render(report)


def test_sizes_that_do_not_allow_a_number_of_ranks_are_refused_before_the_first_run() -> None:
    config = load_config(None, [*MICRO, "parallel.data=2"]).config
    options = ScalingOptions((1, 2), _LENGTH)

    def train(loaded: Loaded) -> TrainResult:
        raise AssertionError("a run was started")

    with raises_error(ConfigError, code="ranks-not-divisible"):
        measure_scaling(Loaded(config), options, train)


def test_strong_scaling_shares_one_global_batch() -> None:
    options = ScalingOptions((1, 2, 3), _LENGTH)
    config = _config(gradient_accumulation_steps=2)
    cases = cases_of(config, options)
    assert cases == [
        ScalingCase(1, 2),
        ScalingCase(2, 2),
        ScalingCase(3, 2),
        ScalingCase(1, 12),
        ScalingCase(2, 6),
        ScalingCase(3, 4),
    ]
    with raises_error(ConfigError, code="no-common-multiple"):
        cases_of(config, ScalingOptions((7, 11, 13), _LENGTH))


def test_threads_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank((1, 2, 4), Units("cpu", 2)) == 1
    assert threads_per_rank((1, 2, 4), Units("cpu", 16)) == 4
    assert threads_per_rank((8,), Units("cpu", 4)) == 1
    assert threads_per_rank((1, 2), Units("cuda", 2)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank((1, 2), Units("cpu", 2)) is None
    assert default_predictions(4) == (8, 16, 32)
    assert default_predictions(3) == (4, 8, 16)


def test_step_is_split_by_the_rank_that_waits_least() -> None:
    busy = {"forward_s": 1.0, "backward_s": 2.0, "optimizer_s": 0.5, "data_s": 0.1, "other_s": 0.2}
    early = {"forward_s": 0.8, "backward_s": 1.6, "optimizer_s": 0.5, "data_s": 0.1, "other_s": 0.2}
    ranks = [{**busy, "communication_s": 0.7}, {**early, "communication_s": 1.3}]
    parts = split_step(ranks)
    assert parts.communication_s == pytest.approx(0.7)
    assert parts.waiting_s == pytest.approx(0.3 + 0.1)
    assert parts.computation_s == pytest.approx(3.2)
    assert parts.other_s == pytest.approx(0.2)


def test_short_runs_do_nothing_besides_steps(tmp_path: Path) -> None:
    config = load_config(
        None,
        {
            "model": "builtin:qwen2-micro",
            "dataset": "builtin:python-docs",
            "split_dataset_ratio": 0.1,
            "report_to": ["tensorboard"],
            "callbacks": ["./mine.py:Callback"],
            "train_args": {"push_to_hub": True, "load_best_model_at_end": True, "max_steps": 900},
        },
    ).config
    short = short_config(config, tmp_path, RunLength(4, 2))
    assert short.train_args.max_steps == 6
    assert short.train_args.logging_steps == 1
    assert not short.train_args.push_to_hub
    assert not short.train_args.load_best_model_at_end
    assert short.callbacks == []
    assert short.report_to == []
    assert short.split_dataset_ratio == 0
    assert short.recovery.max_restarts == 0


def test_steps_with_an_incomplete_batch_are_not_measured() -> None:
    start = {
        "type": "run_start",
        "derived": {"global_batch_size": 8},
        "device": "cuda",
        "strategy": "ddp",
        "precision": "32",
        "world_size": 2,
    }
    steps = [
        {"type": "step", "step": number, "samples": samples, "tokens": 100, "step_time_s": seconds,
         "loss": 1.0, "traffic": {"all_reduce": 40}, "ranks": []}
        for number, (samples, seconds) in enumerate([(8, 9.0), (8, 1.0), (3, 0.1), (8, 3.0)], 1)
    ]  # fmt: skip
    figures = figures_of([start, *steps], 1, None)
    assert figures.step_s == (1.0, 3.0)
    assert figures.first_step_s == 9.0
    assert figures.traffic_bytes == 40
    assert figures.parts is None  # on an accelerator, they are the times of the host
    with raises_error(ConfigError, code="dataset-too-small"):
        figures_of([start, steps[2]], 0, None)


def test_page_works_offline_and_escapes_names() -> None:
    page = render(_report())
    assert "&lt;b&gt;model" in page
    assert "<b>model" not in page
    assert page.count("<svg") == 2
    assert "https://" not in page
    assert "oversubscribed" in page
    assert page.count("Predicted, not measured") == 1


def test_table_has_a_line_per_row() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(scaling_tables(_report()))
    lines = console.export_text().splitlines()
    assert sum(line.startswith(("weak", "strong")) for line in lines) == 8 + 6
    assert any("oversubscribed" in line for line in lines)


def test_options() -> None:
    args = parse("bench", "scaling", "--ranks", "4,1,2", "--predict", "64,16", "--scaling", "weak")
    options = make_options(args)
    assert options.ranks == (1, 2, 4)
    assert options.predict == (16, 64)
    assert options.kinds == ("weak",)
    assert load_job_config(args, BUILTIN).config.model == "builtin:qwen2-tiny"
    args = parse("bench", "scaling", "per_device_train_batch_size=2", "train_args.max_length=128")
    config = load_job_config(args, BUILTIN).config
    assert config.model == "builtin:qwen2-tiny"
    assert config.train_args.per_device_train_batch_size == 2
    assert config.train_args.max_length == 128  # not the built-in 256


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        (["--ranks", "0,1"], "1 to 64"),
        (["--scaling", "big"], "weak, strong"),
        (["--steps", "1"], "2 or more"),
        (["--output", "/no/such/folder/page.html"], "an existing folder"),
    ],
)
def test_rejects_invalid_arguments(tokens: list[str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("bench", "scaling", *tokens)
    assert allowed in str(caught.value)


@pytest.mark.soak
def test_command_measures_1_and_2_ranks(tmp_path: Path) -> None:
    page = tmp_path / "scaling.html"
    completed = run(
        "scaling", *MICRO, "--ranks", "1,2", "--steps", "3", "--warm-up", "1", "--repeats", "2",
        "--json", f"--output={page}", verb="bench", cwd=tmp_path,
    )  # fmt: skip
    report = json.loads(completed.stdout)
    assert report["model"] == "builtin:qwen2-micro"
    assert report["repeats"] == 2
    assert [(row["scaling"], row["ranks"]) for row in report["rows"]] == [
        ("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2),
    ]  # fmt: skip
    for row in report["rows"]:
        is_first = (row["scaling"], row["ranks"]) == ("weak", 1)
        assert row["global_batch_size"] == (4 if is_first else 8)
        assert sum(row["parts"].values()) == pytest.approx(row["step_time_s"], rel=0.2)
        assert row["parts"]["communication_s"] >= 0
        assert row["peak_memory_bytes"] > 1 << 20
    assert set(report["fit"]["terms"]) == {"micro_batch_s", "transfer_s", "update_s"}
    assert "<svg" in page.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.html"]


@pytest.mark.soak
def test_a_config_that_cannot_run_is_reported(tmp_path: Path) -> None:
    completed = run(
        "scaling", *MICRO, "--ranks", "1,2", "parallel.mode=single", verb="bench", expect=2,
        cwd=tmp_path,
    )  # fmt: skip
    assert "nothing to compare" in completed.stderr
    assert list(tmp_path.iterdir()) == []

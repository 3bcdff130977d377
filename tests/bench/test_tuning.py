"""Test `paceline bench tuning`: changes, verdicts, recommendation, tuned config, and real runs."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import MICRO, parse, run
from raised import raises_error
from short_run_figures import short_run

from paceline.bench.claims import CLAIMS
from paceline.bench.short_runs import RunLength, ShortRun
from paceline.bench.tuned_config import check_path, default_path, tuned_text
from paceline.bench.tuning import (
    TuningOptions,
    TuningReport,
    make_report,
    measure_tuning,
    planned_steps,
)
from paceline.bench.tuning_changes import TuningChange, candidate_changes, with_values
from paceline.bench.tuning_decision import (
    Criterion,
    TuningTrial,
    combined_change,
)
from paceline.bench.tuning_text import measured_text, verdict_text
from paceline.commands.bench_tuning import make_options, tuning_tables
from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.train.run_spec import TrainResult

_OPTIONS = TuningOptions(RunLength(8, 2))
_MARGIN = _OPTIONS.margin
_COMPILE = TuningChange("torch_compile: true", "compile", {"train_args.torch_compile": True})
_BF16 = TuningChange(
    "precision: bf16-mixed",
    "precision",
    {"train_args.precision": "bf16-mixed"},
    changes_result="rounded",
)


def _config(**settings: object) -> Config:
    return Config.model_validate({"model": "model", "dataset": "data.jsonl", **settings})


def _trial(change: TuningChange, speedups: list[float], **figures: object) -> TuningTrial:
    """Return a trial whose rounds have these speedups."""
    pairs = [(short_run(1.0), short_run(1 / speedup, **figures)) for speedup in speedups]
    return TuningTrial(change, pairs)


def _report(trials: list[TuningTrial], chosen: TuningTrial | None) -> TuningReport:
    criterion = Criterion(_OPTIONS.goal, _MARGIN, 300)
    return make_report(_config(), criterion, 8, [short_run(1.0)], trials, chosen)


def test_changes_of_a_plain_config() -> None:
    changes = candidate_changes(_config(), "32", num_ranks=2, num_cores=2, device_type="cpu")
    assert [change.name for change in changes] == [
        "precision: bf16-mixed",
        "gradient_checkpointing: full",
        "gradient_checkpointing: selective",
        "dataloader_num_workers: 1",
        "compression.method: bf16",
        "compression.method: topk",
        "packing: false",
        "micro-batches: 2 × 2",
        "torch_compile: true",
    ]
    changing = {change.technique for change in changes if change.changes_result}
    assert changing == {"precision", "compression"}
    for change in changes:
        changed = with_values(_config(), change.values)
        assert changed != _config()
        assert changed.train_args.seed == _config().train_args.seed


def test_changes_turn_off_what_is_on() -> None:
    config = _config(
        train_args={
            "gradient_checkpointing": "full",
            "dataloader_num_workers": 2,
            "torch_compile": True,
            "packing": False,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 4,
        },
        compression={"method": "bf16"},
    )
    changes = candidate_changes(config, "bf16-mixed", num_ranks=2, num_cores=16, device_type="cpu")
    assert {change.name: change.turns_on for change in changes} == {
        "precision: 32": False,
        "gradient_checkpointing: none": False,
        "dataloader_num_workers: 0": False,
        "compression.method: none": False,
        "packing: true": True,
        "micro-batches: 2 × 6": False,
        "torch_compile: false": False,
    }


def test_accumulation_keeps_the_global_batch() -> None:
    config = _config(
        train_args={"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    )
    changes = candidate_changes(config, "32", num_ranks=1, num_cores=2, device_type="cpu")
    sizes = [
        with_values(config, change.values).train_args
        for change in changes
        if change.technique == "accumulation"
    ]
    assert [args.per_device_train_batch_size for args in sizes] == [3, 12]
    for args in sizes:
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 12
    assert not [change for change in changes if change.technique == "compression"]  # one rank


@pytest.mark.parametrize(
    ("speedups", "verdict"),
    [
        ([1.30, 1.32, 1.28, 1.31], "recommended"),
        ([1.01, 1.00, 1.02, 1.01], "no gain"),
        ([0.70, 0.72, 0.71, 0.69], "no gain"),
        ([1.02, 1.05, 1.03, 1.06], "unclear"),
        ([0.80, 1.40, 1.00, 1.60], "unclear"),
        ([1.50], "unclear"),
    ],
)
def test_verdict_needs_the_whole_interval_above_the_margin(
    speedups: list[float], verdict: str
) -> None:
    assert Criterion("time", _MARGIN).verdict(_trial(_COMPILE, speedups)) == verdict


def test_memory_is_a_goal_of_its_own() -> None:
    pairs = [
        (short_run(1.0, memory_bytes=1000 + noise), short_run(1.5, memory_bytes=600 - noise))
        for noise in (0, 4, 9)
    ]
    trial = TuningTrial(_COMPILE, pairs)
    assert Criterion("memory", _MARGIN).verdict(trial) == "recommended"
    assert Criterion("time", _MARGIN).verdict(trial) == "no gain"
    unknown = TuningTrial(_COMPILE, [(short_run(1.0), short_run(1.0, memory_bytes=None))] * 3)
    assert Criterion("memory", _MARGIN).verdict(unknown) == "unclear"


def test_a_longer_first_step_must_pay_off_within_the_run() -> None:
    pairs = [
        (short_run(1.0, first_step_s=1.0), short_run(0.8 + noise, first_step_s=41.0))
        for noise in (0.0, 0.01, -0.01)
    ]
    trial = TuningTrial(_COMPILE, pairs)
    assert trial.steps_to_pay_off() == pytest.approx(200)
    assert Criterion("time", _MARGIN, 300).verdict(trial) == "recommended"
    assert Criterion("time", _MARGIN, 199).verdict(trial) == "no gain"
    assert Criterion("time", _MARGIN).verdict(trial) == "recommended"


def test_table_says_when_a_longer_first_step_pays_off() -> None:
    pairs = [
        (short_run(1.0, first_step_s=1.0), short_run(0.8 + noise, first_step_s=100.9))
        for noise in (0.0, 0.01, -0.01)
    ]
    (change,) = _report([TuningTrial(_COMPILE, pairs)], None)["changes"]
    assert change["verdict"] == "no gain"  # the run has 300 steps
    text = verdict_text(change, 300)
    assert text == "no gain: pays off after 500 steps, the run has 300"
    assert verdict_text(change | {"verdict": "recommended"}, None).endswith("after 500 steps")


def test_repeating_gives_the_same_recommendation() -> None:
    """Measure changes with known gains 200 times, with noise of 5 % in each run."""
    generator = random.Random(7)
    gains = {"a": 1.4, "b": 1.0, "c": 0.8}
    recommended = dict.fromkeys(gains, 0)
    for _ in range(200):
        trials = [
            _noisy_trial(TuningChange(name, name, {name: True}), gain, generator)
            for name, gain in gains.items()
        ]
        for trial in Criterion("time", _MARGIN).select(trials):
            recommended[trial.change.name] += 1
    assert recommended["a"] >= 198
    assert recommended["b"] <= 2
    assert recommended["c"] == 0


def test_repeating_recommends_the_same_combination() -> None:
    """The second change adds less than the noise to the first one."""
    generator = random.Random(7)
    recommended = []
    for _ in range(200):
        trials = [_noisy_trial(_BF16, 1.4, generator), _noisy_trial(_COMPILE, 1.3, generator)]
        selected = Criterion("time", _MARGIN).select(trials)
        combined = _noisy_trial(combined_change(selected), 1.45, generator)
        chosen = Criterion("time", _MARGIN).choose(selected, combined)
        recommended.append("" if chosen is None else chosen.change.name)
    assert recommended.count("precision: bf16-mixed + torch_compile: true") >= 198


def test_repeating_gives_the_same_verdict_on_a_busy_machine() -> None:
    """Every tenth run is much slower than the others, as on a virtual machine whose host is busy,
    and the gain is much smaller than what such a run loses."""
    generator = random.Random(7)

    def ratio(gain: float) -> float:
        first, second = (
            generator.lognormvariate(0, 0.03) * (1.4 if generator.random() < 0.1 else 1.0)
            for _ in range(2)
        )
        return gain * first / second

    verdicts = []
    for _ in range(200):
        for gain in (1.12, 1.01):
            trial = _measured_until_clear(_COMPILE, lambda gain=gain: ratio(gain))
            verdicts.append((gain, Criterion("time", _MARGIN).verdict(trial)))
    assert verdicts.count((1.12, "recommended")) >= 190
    assert verdicts.count((1.01, "recommended")) == 0


def test_runs_with_short_steps_have_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def run_fast(loaded: Loaded, train: object, length: RunLength) -> ShortRun:
        lengths.append(length)
        return short_run(0.125)

    monkeypatch.setattr("paceline.bench.tuning.run_short", run_fast)
    options = TuningOptions(RunLength(10, 2), min_measured_s=3.0, rounds=1, techniques=("packing",))
    report = measure_tuning(Loaded(_config()), options, train=lambda loaded: None)  # type: ignore[arg-type, return-value]
    assert lengths[0] == RunLength(10, 2)
    assert set(lengths[1:]) == {RunLength(24, 2)}
    assert report["steps"] == 24


def _noisy_trial(change: TuningChange, gain: float, generator: random.Random) -> TuningTrial:
    return _measured_until_clear(change, lambda: gain * generator.lognormvariate(0, 0.05))


def _measured_until_clear(change: TuningChange, speedup: Callable[[], float]) -> TuningTrial:
    """Return a trial with up to four times five rounds, as the command measures it."""
    trial = _trial(change, [speedup() for _ in range(5)])
    while len(trial.pairs) < 20 and Criterion("time", _MARGIN).verdict(trial) == "unclear":
        trial.pairs.extend(_trial(change, [speedup() for _ in range(5)]).pairs)
    return trial


def test_conflicting_changes_are_not_combined() -> None:
    half = TuningChange("half", "accumulation", {"train_args.per_device_train_batch_size": 2})
    double = TuningChange("double", "accumulation", {"train_args.per_device_train_batch_size": 8})
    trials = [
        _trial(half, [1.10, 1.11, 1.12]),
        _trial(_BF16, [1.80, 1.81, 1.82]),
        _trial(double, [1.30, 1.31, 1.32]),
        _trial(_COMPILE, [1.00, 1.01, 1.00]),
    ]
    selected = Criterion("time", _MARGIN).select(trials)
    assert [trial.change.name for trial in selected] == ["precision: bf16-mixed", "double"]
    combined = combined_change(selected)
    assert combined.values == {
        "train_args.precision": "bf16-mixed",
        "train_args.per_device_train_batch_size": 8,
    }
    assert combined.changes_result == "rounded"


def test_combination_is_recommended_only_if_it_is_better() -> None:
    selected = [_trial(_BF16, [1.80, 1.81, 1.82]), _trial(_COMPILE, [1.20, 1.21, 1.22])]
    change = combined_change(selected)
    better = _trial(change, [2.0, 2.1, 2.05])
    worse = _trial(change, [1.5, 1.5, 1.51])
    refused = TuningTrial(change, error=("not supported", "no"))
    assert Criterion("time", _MARGIN).choose(selected, better) is better
    assert Criterion("time", _MARGIN).choose(selected, worse) is selected[0]
    assert Criterion("time", _MARGIN).choose(selected, refused) is selected[0]
    assert Criterion("time", _MARGIN).choose([], None) is None


def test_report_has_the_measured_value_beside_each_claim() -> None:
    full = TuningChange("full", "checkpointing", {"train_args.gradient_checkpointing": "full"})
    off = TuningChange("precision: 32", "precision", {}, turns_on=False)
    trials = [
        _trial(off, [0.5, 0.5, 0.5]),
        _trial(full, [0.8, 0.8, 0.8], memory_bytes=3 << 28),
    ]
    report = _report(trials, None)
    claims = {claim["technique"]: claim for claim in report["claims"]}
    assert claims["precision"]["measured"] == pytest.approx(2)  # with, relative to without
    assert claims["checkpointing"]["measured"] == pytest.approx(0.25)
    assert claims["prefetch"]["measured"] is None
    assert measured_text(claims["prefetch"]) == "not measured"
    assert measured_text(claims["checkpointing"]).startswith("25 % less")
    grows = claims["checkpointing"] | {"measured": -0.02, "measured_interval": (-0.05, 0.01)}
    assert measured_text(grows) == "2.0 % more (-1.0 % to 5.0 %)"
    assert all(claim.url.startswith("https://") and claim.says for claim in CLAIMS)
    assert len({claim.technique for claim in CLAIMS}) == 4
    json.dumps(report)


def test_tables_show_all_changes() -> None:
    from rich.console import Console

    best = _trial(_COMPILE, [1.30, 1.32, 1.28])
    refused = TuningTrial(_BF16, error=("not supported", "bfloat16 is not supported here"))
    report = _report([best, refused], best)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tuning_tables(report))
    text = console.export_text()
    assert "recommendation: torch_compile: true" in text
    assert "bfloat16 is not supported here" in text
    assert text.count("source:") == len(CLAIMS)


class _Machine:
    """A machine on which a run takes a known time."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, loaded: Loaded) -> ShortRun:
        self.batches.append(loaded.config.train_args.per_device_train_batch_size)
        if loaded.config.train_args.torch_compile:
            raise RunError("the compiler failed")
        if loaded.config.train_args.precision == "bf16-mixed":
            raise ConfigError("bfloat16 is not supported here")
        return short_run(1.0 if loaded.config.train_args.packing == "auto" else 0.5)


def test_changes_that_fail_do_not_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine()
    monkeypatch.setattr(
        "paceline.bench.tuning.run_short", lambda loaded, train, length: machine(loaded)
    )
    options = TuningOptions(
        RunLength(8, 2), rounds=2, techniques=("precision", "packing", "compile")
    )
    report = measure_tuning(Loaded(_config()), options, train=lambda loaded: None)  # type: ignore[arg-type, return-value]
    changes = {change["technique"]: change for change in report["changes"]}
    assert changes["precision"]["verdict"] == "not supported"
    assert changes["compile"]["verdict"] == "failed"
    assert changes["compile"]["reason"] == "the compiler failed"
    assert changes["packing"]["verdict"] == "recommended"
    assert changes["packing"]["rounds"] == 2
    assert report["recommendation"] is not None
    assert report["recommendation"]["values"] == {"train_args.packing": False}


def test_tuned_config_keeps_other_keys_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (
        "# My config\nmodel: builtin:qwen2-micro  # small\ndataset: a.jsonl\nlearning_rate: 1e-3\n"
    )
    path.write_text(text)
    loaded = load_config(path, ["max_length=64"])
    best = _trial(_BF16, [1.8, 1.8, 1.8])
    tuned = tuned_text(loaded, _report([best], best))
    assert tuned is not None
    assert "# My config" in tuned
    assert "# small" in tuned
    assert "This changes the result: rounded." in tuned
    written = tmp_path / "mine.tuned.yaml"
    written.write_text(tuned)
    assert default_path(loaded) == written
    config = load_config(written).config
    assert config.train_args.precision == "bf16-mixed"
    assert config.train_args.max_length == 64
    assert config.train_args.learning_rate == 1e-3
    expected = with_values(loaded.config, _BF16.values)
    assert config == expected
    check_path(written)
    with raises_error(ConfigError, code="tuned-config-exists"):
        check_path(path)
    with raises_error(ConfigError, code="tuned-config-not-writable"):
        check_path(tmp_path / "missing" / "tuned.yaml")
    assert tuned_text(loaded, _report([best], None)) is None


def test_tuned_config_without_a_file_has_what_was_set() -> None:
    loaded = load_config(None, ["model=builtin:qwen2-micro", "dataset=a.jsonl", "max_length=64"])
    best = _trial(_COMPILE, [1.8, 1.8, 1.8])
    tuned = tuned_text(loaded, _report([best], best))
    assert tuned is not None
    assert yaml.safe_load(tuned) == {
        "model": "builtin:qwen2-micro",
        "dataset": "a.jsonl",
        "train_args": {"max_length": 64, "torch_compile": True},
    }


def test_planned_steps() -> None:
    assert planned_steps(_config(train_args={"max_steps": 7}), short_run(1.0)) == 7
    assert planned_steps(_config(train_args={"num_train_epochs": 2.5}), short_run(1.0)) == 250


def test_options() -> None:
    args = parse("bench", "tuning", "mine.yaml", "--keep-result", "--techniques", "compile,packing")
    options = make_options(args)
    assert options.keep_result
    assert options.techniques == ("compile", "packing")
    assert options.margin == 0.05
    assert (options.length.steps, options.min_measured_s) == (10, 3.0)
    args = parse("bench", "tuning", "mine.yaml", "--steps", "4")
    assert (make_options(args).length.steps, make_options(args).min_measured_s) == (4, 0.0)
    for tokens in (["--margin", "1.5"], ["--goal", "speed"], ["--techniques", "magic"]):
        with pytest.raises(ConfigError):
            parse("bench", "tuning", "mine.yaml", *tokens)


@pytest.mark.soak
def test_command_measures_real_runs(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    lines = [f"{key}: {value}" for key, value in (line.split("=", 1) for line in MICRO[:2])]
    config.write_text("\n".join(["# mine", *lines, "parallel: {device: cpu}", ""]))
    completed = run(
        "tuning", str(config), *MICRO[3:], "--techniques", "compression,packing",
        "--steps", "3", "--warm-up", "1", "--repeats", "2", "--json", verb="bench",
        timeout_s=900,
    )  # fmt: skip
    report = json.loads(completed.stdout)
    changes = {change["name"]: change for change in report["changes"]}
    assert set(changes) == {
        "compression.method: bf16",
        "compression.method: topk",
        "packing: false",
    }
    for change in changes.values():
        assert change["verdict"] in ("recommended", "no gain", "unclear")
        assert change["rounds"] >= 2
        assert change["speedup"] > 0
        if change["changes_result"] is None:
            assert change["loss_difference"] < 1e-5
    assert changes["compression.method: bf16"]["traffic_ratio"] == pytest.approx(0.5, rel=0.05)
    assert changes["compression.method: topk"]["traffic_ratio"] < 0.1
    assert changes["packing: false"]["traffic_ratio"] == pytest.approx(1)
    is_recommended = report["recommendation"] is not None
    assert (report["tuned_config"] is not None) == is_recommended
    assert (tmp_path / "mine.tuned.yaml").exists() == is_recommended
    assert config.read_text().startswith("# mine")


def test_techniques_without_a_change_are_refused_before_the_first_run() -> None:
    config = load_config(None, [*MICRO, "packing_strategy=wrapped"])
    options = TuningOptions(RunLength(8, 2), techniques=("packing",))

    def train(loaded: Loaded) -> TrainResult:
        raise AssertionError("a run was started")

    with raises_error(ConfigError, code="nothing-to-tune"):
        measure_tuning(config, options, train)

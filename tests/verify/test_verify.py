"""Test that `paceline verify` certifies equal modes, reports wrong strategies and rejects unknown
names."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from commands import run
from raised import raises_error

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog
from paceline.core.report import REPORT_KEYS
from paceline.core.run_dir import RunDir
from paceline.distributed.devices import Devices
from paceline.observe.report.html import write_reports
from paceline.verify.certificate import (
    Bounds,
    combine,
    evaluate_mode,
    loss_difference,
    weight_difference,
)
from paceline.verify.modes import all_modes, hybrids, make_mode, split_names
from paceline.verify.run import _modes

MICRO = (
    "model=builtin:qwen2-micro",
    "dataset=builtin:python-docs#80",
    "parallel.device=cpu",
    "per_device_train_batch_size=1",
    "max_length=64",
)
USER_STRATEGIES = '''
import torch
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.parallel.spec import StrategySpec


class UnsyncedStrategy(DDPStrategy):
    """A wrong strategy that never sums the gradients of the ranks."""

    def forward_backward(self, micro_step, num_micro_batches):
        self.buckets.zero()
        for number in range(num_micro_batches):
            micro_step(number, self.model).backward()


class CrashingStrategy(DDPStrategy):
    """A strategy whose rank 1 raises in the third step, while the others wait for it."""

    steps = 0

    def forward_backward(self, micro_step, num_micro_batches):
        self.steps += 1
        if self.steps == 3 and self.world.rank == 1:
            raise RuntimeError("injected error on rank 1")
        super().forward_backward(micro_step, num_micro_batches)


UNSYNCED = StrategySpec("unsynced", "user_strategies:UnsyncedStrategy")
CRASHING = StrategySpec("crashing", "user_strategies:CrashingStrategy")
'''


@pytest.mark.soak
def test_certifies_equal_modes_with_their_costs(tmp_path: Path) -> None:
    completed = run(
        *MICRO,
        "--world-size",
        "2",
        "--modes",
        "single,ddp,zero1",
        "--steps",
        "6",
        "--output",
        str(tmp_path / "out"),
        "--json",
        verb="verify",
        cwd=tmp_path,
    )
    certificate = json.loads(completed.stdout)
    assert (certificate["world_size"], certificate["reference"], certificate["ok"]) == (
        2,
        "single",
        True,
    )
    assert [mode["mode"] for mode in certificate["modes"]] == ["single", "ddp", "zero1"]
    single, ddp, zero1 = certificate["modes"]
    assert (
        single["loss_rel_diff"],
        single["weight_rel_diff"],
        single["traffic_bytes"]["measured"],
    ) == (0, 0, 0)
    for mode in (ddp, zero1):
        assert mode["loss_rel_diff"] <= 1e-5
        assert mode["weight_rel_diff"] <= 1e-3
        assert mode["loss_rel_diff_ddp"] <= 1e-6
        for key in ("state_bytes", "traffic_bytes"):
            assert mode[key]["measured"] == pytest.approx(mode[key]["predicted"], rel=0.02)
    assert zero1["state_bytes"]["measured"] < 0.8 * ddp["state_bytes"]["measured"]
    assert (ddp["relative_step_time"], ddp["reason"]) == (1.0, None)
    assert json.loads((tmp_path / "out" / "verify.json").read_text()) == certificate
    assert "builtin:qwen2-micro" in (tmp_path / "out" / "verify.html").read_text()
    # verify writes only its output folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.soak
def test_reports_wrong_and_crashing_strategies(
    tmp_path: Path,
) -> None:
    (tmp_path / "user_strategies.py").write_text(USER_STRATEGIES)
    completed = run(
        *MICRO,
        "--world-size",
        "2",
        "--modes",
        "user_strategies:CRASHING,user_strategies:UNSYNCED",
        "--steps",
        "4",
        "--json",
        verb="verify",
        expect=1,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    certificate = json.loads(completed.stdout)
    crashing, unsynced = certificate["modes"]
    assert certificate["ok"] is False
    assert crashing["ok"] is False
    assert "injected error on rank 1" in crashing["reason"]
    assert unsynced["ok"] is False
    assert unsynced["loss_rel_diff"] > 1e-5
    assert unsynced["reason"].startswith("the losses differ by ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--modes", "ddp,zero4"), "`--modes zero4` is not a mode"),
        (("--modes", "data2-tensor2", "--world-size", "2"), "does not make 2 ranks"),
        (("--world-size", "1"), "2 or more"),
    ],
)
def test_rejects_invalid_arguments_before_training(
    tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    completed = run(*MICRO, *args, verb="verify", expect=2, cwd=tmp_path)
    assert message in completed.stderr
    assert "step" not in completed.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("requested", [None, "all"])
def test_lists_a_mode_with_different_losses_with_the_reason(
    requested: str | None,
) -> None:
    config = Config(
        model="builtin:qwen2-micro",
        dataset="builtin:python-docs#80",
        parallel={"mode": "diloco", "device": "cpu"},
    )
    names = all_modes(config, 2)
    modes, excluded = _modes(config, Devices("cpu", 2), names, requested)
    assert "diloco" not in [mode.name for mode in modes]
    report = next(mode for mode in excluded if mode["mode"] == "diloco")
    assert "diloco" in names
    assert report["ok"] is None
    assert "not compared with `single`: its losses and weights differ by design" in str(
        report["reason"]
    )
    # A mode that is requested explicitly is compared.
    assert "diloco" in [
        mode.name for mode in _modes(config, Devices("cpu", 2), ["diloco"], "diloco")[0]
    ]
    assert "diloco" not in all_modes(
        config.model_copy(update={"parallel": Parallel(mode="ddp")}), 2
    )


def test_excludes_unsupported_modes() -> None:
    parallel = {"mode": "parameter_server", "device": "cpu"}
    config = Config(
        model="builtin:dlrm", task="recommend", dataset="builtin:clicks", parallel=parallel
    )
    modes, excluded = _modes(config, Devices("cpu", 2), all_modes(config, 2), None)
    # The task does not support these modes.
    assert not {"tensor", "pipeline", "pipeline-gpipe"} & {mode.name for mode in modes}
    message = "`parameter_server` is not supported with `paceline verify`: it needs servers"
    reasons = {mode["mode"]: mode["reason"] for mode in excluded}
    assert message in str(reasons["parameter_server"])
    with pytest.raises(ConfigError, match=message):
        _modes(config, Devices("cpu", 2), ["parameter_server"], "parameter_server")


def test_parses_names_of_modes() -> None:
    config = Config(
        model="m", dataset="d", parallel={"pipeline_schedule": "gpipe", "tensor": 2, "data": 2}
    )
    names = all_modes(config, 4)
    assert len(names) == len(set(names))
    assert {
        "single",
        "dp",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "tensor",
        "pipeline",
        "deepspeed",
    } <= set(names)
    assert "pipeline-1f1b" in names  # the other schedules; the config's own is `pipeline`
    assert "pipeline-gpipe" not in names
    assert hybrids(4) == [
        "data2-shard2", "data2-context2", "data2-tensor2", "data2-pipeline2", "shard2-context2",
        "shard2-tensor2", "shard2-pipeline2", "context2-tensor2", "context2-pipeline2",
        "tensor2-pipeline2",
    ]  # fmt: skip
    assert "data2-tensor2-pipeline2" in hybrids(8)
    assert hybrids(3) == []
    for name in names:
        mode = make_mode(name, config, 4)
        assert (mode.name, mode.layout.axes.size) == (name, 1 if name == "single" else 4)
    assert split_names("fsdp, pipeline-interleaved-1f1b,fsdp", config, 4) == [
        "zero3",
        "pipeline-interleaved_1f1b",
    ]
    tensor = make_mode("shard2-tensor2", config, 4).parallel
    assert (tensor.data, tensor.shard, tensor.tensor, tensor.mode) == (None, 2, 2, "hybrid")
    with raises_error(ConfigError, code="repeated-axis"):
        split_names("data2-data2", config, 4)


def rank_result(**changes: Any) -> dict[str, Any]:
    costs = {
        "state_predicted": 1000,
        "state_measured": 1000,
        "traffic_predicted": 10_000,
        "traffic_measured": 10_100,
    }
    weights = {"model/a": [0.0, 8.0, 2.0, 8.0], "model/b": [0.0, 2.0, 2.0, 2.0]}
    return {
        "status": "done",
        "losses": [2.0, 1.0],
        "step_time_s": 0.1,
        "weights": weights,
        "notices": [],
        **costs,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"losses": [2.0, 1.1]}, "the losses differ by 1.0e-01"),
        ({"losses": [2.0, math.nan]}, "the losses differ by nan"),
        ({"losses": [2.0, 1.000005]}, "differ from ddp's by 5.0e-06"),
        (
            {"weights": {"model/a": [0.0, 8.0, 2.0, 8.0], "model/b": [2e-4, 2.0, 2.0, 2.0]}},
            "the weights differ by 1.0e-02 (b)",
        ),
        (
            {"weights": {"model/a": [0.0, 4.0, 2.0, 8.0], "model/b": [0.0, 2.0, 2.0, 2.0]}},
            "1 weight not owned by exactly one rank (a)",
        ),
        ({"state_measured": 1021}, "measured state is 1021 B, predicted 1000 B (+2.1%)"),
        ({"traffic_measured": 9_500}, "measured traffic is 9.3 KiB"),
    ],
)
def test_reports_differences_above_the_bounds(changes: dict[str, Any], message: str | None) -> None:
    reference, candidate = (
        combine([rank_result(), {"status": "idle"}]),
        combine([{"status": "idle"}, rank_result(**changes)]),
    )
    mode_result = evaluate_mode(
        "zero2",
        "shard 2",
        candidate,
        reference,
        reference,
        Bounds(loss=1e-5, weights=1e-3, family=1e-6),
    )
    assert mode_result["ok"] is (message is None)
    assert message is None or message in str(mode_result["reason"])
    json.dumps(mode_result, allow_nan=False)


def test_differences_are_relative_and_detect_nan() -> None:
    assert loss_difference([2.0, 1.0], [2.0, 1.25]) == 0.2
    assert math.isnan(loss_difference([math.nan, 1.0], [2.0, 1.0]))
    halves = [{"a": [4.0, 2.0, 100.0, 4.0]}, {"a": [5.0, 2.0, 100.0, 4.0]}]
    assert weight_difference(halves) == (pytest.approx(0.3), "a", [])
    # A tensor that is 0 is compared relative to the model's root mean square: 1e-4 / (1e-2 × 5).
    small = [{"a": [0.0, 4.0, 100.0, 4.0], "zero": [1e-8, 1.0, 0.0, 1.0]}]
    assert weight_difference(small)[0] == pytest.approx(1e-4 / (1e-2 * math.sqrt(100 / 5)))


def test_report_shows_the_certificate_of_its_run(tmp_path: Path) -> None:
    config = {"model": "builtin:example", "task": "sft"}
    run_dir = RunDir(tmp_path)
    log = EventLog(run_dir.events)
    log.emit({"type": "run_start", "config": config})
    log.close()
    report = {**dict.fromkeys(REPORT_KEYS), "status": "done"}
    reference = combine([rank_result()])
    mode_result = evaluate_mode(
        "<zero2>",
        "shard 2",
        combine([rank_result(losses=[2.0, 1.1])]),
        reference,
        reference,
        Bounds(1e-5, 1e-3, 1e-6),
    )
    certificate = {
        "world_size": 2,
        "reference": "single",
        "ok": False,
        "modes": [mode_result],
        "steps": 2,
        "device": "cpu",
        "precision": "float32",
        "optim": "adamw",
        "global_batch_size": 4,
        "dataset": ["d"],
        "time": 0.0,
        **config,
        "bounds": {"loss": 1e-5, "weights": 1e-3, "family": 1e-6, "cost": 0.02},
    }
    (tmp_path / "verify.json").write_text(json.dumps(certificate))
    write_reports(run_dir, report)
    page = run_dir.report_html.read_text()
    assert "Certificate</span></h2>" in page
    assert "&lt;zero2&gt;" in page
    assert "the losses differ by 1.0e-01" in page
    (tmp_path / "verify.json").write_text(json.dumps({**certificate, "model": "another"}))
    write_reports(run_dir, report)
    assert "Certificate</span></h2>" not in run_dir.report_html.read_text()

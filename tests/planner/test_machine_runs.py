"""Test that measured rates, earlier runs and calibrations of a machine change its plans."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from commands import report, train
from raised import raises_error

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.doctor.rates import fit_curve
from paceline.planner.machine.calibration import calibrate
from paceline.planner.machine.history import (
    MIN_STEPS,
    PastRun,
    append,
    correction,
    read_runs,
    run_of,
)

RUN = PastRun(
    host=socket.gethostname(),
    device="cpu",
    strategy="ddp",
    world_size=2,
    model="builtin:qwen2-micro",
    parts_s={"products_s": 0.6, "launches_s": 0.2, "traffic_s": 0.1, "optimizer_s": 0.1},
    measured_s=1.5,
    day="2026-01-31",
    output_dir="run",
)
PLAN = [
    "plan", "model=builtin:qwen2-micro", "dataset=builtin:python-docs", "parallel.device=cpu",
    "--world-size", "2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_curve_is_recovered_from_times() -> None:
    shapes = [(rows, inputs, 3 * inputs) for rows in (64, 512, 4096) for inputs in (128, 1024)]
    times = [
        2 * rows * inputs * outputs / 1e11 * (1 + 40 / rows + 25 * (1 / inputs + 1 / outputs))
        for rows, inputs, outputs in shapes
    ]
    curve = fit_curve(shapes, times)
    assert curve.flops_s == pytest.approx(1e11)
    assert (curve.row_loss, curve.width_loss) == (pytest.approx(40), pytest.approx(25))


def test_history_corrects_more_with_more_and_similar_runs() -> None:
    def factor(*runs: PastRun) -> float:
        return correction(runs, "ddp", 2, "builtin:qwen2-micro")

    assert factor() == 1
    assert 1 < factor(RUN) < factor(RUN, RUN, RUN) < 1.5
    assert 1 < factor(replace(RUN, strategy="zero3")) < factor(RUN)
    assert factor(replace(RUN, model="another")) == 1
    assert factor(replace(RUN, measured_s=1000.0)) < 3


def test_history_keeps_one_run_per_folder_and_machine() -> None:
    append(RUN)
    append(replace(RUN, measured_s=2.0))
    append(replace(RUN, host="another", output_dir="elsewhere"))
    assert [run.measured_s for run in read_runs("cpu")] == [2.0]
    assert read_runs("cuda") == ()


def test_only_runs_with_enough_steps_are_history() -> None:
    times = {"parts": RUN.parts_s, "measured": 1.5, "measured_steps": MIN_STEPS}
    report = {"step_time_s": times, "device": "cpu", "strategy": "ddp", "world_size": 2}
    assert run_of(report, RUN.model, "run") == replace(RUN, day=_today())
    assert run_of(report | {"step_time_s": times | {"measured_steps": 3}}, "a", "run") is None
    assert run_of(report | {"step_time_s": times | {"parts": None}}, "a", "run") is None


def _today() -> str:
    from datetime import date

    return date.today().isoformat()


def test_calibration_finds_which_work_takes_longer() -> None:
    """Computation takes twice as long as predicted, and traffic half as long."""
    shares = [(0.9, 0.05), (0.5, 0.4), (0.2, 0.7), (0.7, 0.2)]
    runs = [
        replace(
            RUN,
            parts_s={"products_s": work, "traffic_s": sent, "optimizer_s": 0.01},
            measured_s=2 * work + 0.5 * sent + 0.01,
        )
        for work, sent in shares
    ]
    fitted = calibrate(runs)
    assert fitted.computation == pytest.approx(2, rel=0.05)
    assert fitted.traffic == pytest.approx(0.5, rel=0.15)
    assert fitted.launches == pytest.approx(1, rel=0.01)
    for run in runs:
        assert fitted.seconds(run.parts_s) == pytest.approx(run.measured_s, rel=0.05)
    with raises_error(ConfigError, code="different-devices"):
        calibrate([RUN, replace(RUN, device="cuda")])


def _write_run(folder: Path) -> None:
    folder.mkdir()
    times = {"predicted": 1.0, "measured": 2.0, "measured_steps": 20, "parts": RUN.parts_s}
    report = {"step_time_s": times, "device": "cpu", "strategy": "ddp", "world_size": 2}
    (folder / "report.json").write_text(json.dumps(report))
    start = {"time": 1.0, "type": "run_start", "model": {"name": RUN.model}}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")


def _ddp(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[float, str]:
    """Return the planned time of ddp, and the notes."""
    assert main([*PLAN, "--json", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    time = next(mode["step_time_s"] for mode in plan["modes"] if mode["mode"] == "ddp")
    return time, "\n".join(plan["notes"])


def test_plan_uses_and_names_calibration_and_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.planner.machine.hardware._measured_cpu", lambda dtype: 5e10)
    before, notes = _ddp(capsys)
    assert "history" not in notes
    _write_run(tmp_path / "run")
    assert main(["plan", "--calibrate", str(tmp_path / "run")]) == 0
    assert "calibration on cpu: computation × " in capsys.readouterr().out
    calibrated, notes = _ddp(capsys)
    assert calibrated > 1.2 * before
    assert "calibration: fitted to 1 run" in notes
    append(replace(RUN, measured_s=4.0))
    corrected, notes = _ddp(capsys)
    assert corrected > 1.2 * calibrated
    assert "history: 1 run on this machine" in notes
    assert "the latest, ddp of builtin:qwen2-micro in run, took 4.00 × the predicted time" in notes
    without, notes = _ddp(capsys, "--no-history")
    assert without == pytest.approx(calibrated)
    assert "history" not in notes
    assert main(["plan", "--calibrate", str(tmp_path / "nothing")]) == 2
    assert "there is no finished run in this folder" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_reports_both_times_and_becomes_history(tmp_path: Path) -> None:
    # In a process of its own: ranks of this one may have the cache of an earlier test.
    args = ("parallel.num_gpus=2", "parallel.mode=ddp", f"max_steps={MIN_STEPS + 2}")
    train(tmp_path / "run", *args)
    times = report(tmp_path / "run")["step_time_s"]
    assert isinstance(times, dict)
    assert times["predicted"] > 0 < times["measured"]
    assert times["measured_steps"] == MIN_STEPS + 1
    assert sum(times["parts"].values()) == pytest.approx(times["predicted"])
    assert [run.output_dir for run in read_runs("cpu")] == [str(tmp_path / "run")]
    assert "Time per step" in (tmp_path / "run" / "report.html").read_text()

"""Test every strategy on simulated CUDA devices: the losses are those of the CPU device."""

import json
from pathlib import Path

import pytest
from commands import losses, report
from cpu_reference import Reference
from device_runs import MODEL, run_on, train_on
from switches import (
    ALL_SWITCHES,
    LAYOUTS,
    NUM_MICRO_BATCHES,
    QUICK_SWITCHES,
    TOLERANCES,
    Layout,
    Switches,
    soaked_except,
)

from paceline.parallel.registry import OTHER_TRAINING
from paceline.parallel.support_table import COLUMNS, Settings, reason_against, rows

pytestmark = pytest.mark.slow

QUICK = ("ddp", "zero1", "zero2", "zero3", "deepspeed-2", "tensor", "pipeline", "shard2-tensor2")


def compare_with_cpu(
    layout: Layout, switches: Switches, cpu_losses: Reference, folder: Path
) -> None:
    train_on("cuda", folder, *layout.args, *switches.args)
    result = report(folder)
    assert (result["device"], result["status"]) == ("cuda", "done")
    assert losses(folder) == pytest.approx(
        cpu_losses(layout, switches), rel=TOLERANCES[switches.precision]
    )
    weights = "adapter_model" if switches.is_lora else "model"
    assert (folder / "model" / f"{weights}.safetensors").is_file()


def quick_switches(layout: Layout) -> Switches:
    supported = [switches for switches in QUICK_SWITCHES if layout.supports(switches)]
    return supported[LAYOUTS.index(layout) % len(supported)]


@pytest.mark.parametrize("layout", soaked_except(*QUICK))
def test_losses_are_those_of_the_cpu(layout: Layout, cpu_losses: Reference, tmp_path: Path) -> None:
    compare_with_cpu(layout, quick_switches(layout), cpu_losses, tmp_path / "run")


@pytest.mark.soak
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=str)
@pytest.mark.parametrize(
    ("modes", "world_size"), [([], 2), (["--modes=hybrid"], 4)], ids=["all", "hybrid"]
)
def test_every_mode_of_verify(
    modes: list[str], world_size: int, switches: Switches, cpu_losses: Reference
) -> None:
    """`paceline verify` trains with all modes in one start of the ranks. A mode is refused only if
    the table of what each strategy supports refuses it."""
    args = (*MODEL, *switches.args, "per_device_train_batch_size=2", "resume=never")
    accumulation = f"gradient_accumulation_steps={NUM_MICRO_BATCHES // world_size}"
    options = ("--steps=3", f"--world-size={world_size}", "--json")
    done = run_on("cuda", *args, accumulation, *options, *modes, verb="verify", timeout_s=900)
    certificate = json.loads(done.stdout)
    assert certificate["device"] == "cuda"
    results = {mode["mode"]: mode for mode in certificate["modes"]}
    expected = cpu_losses(LAYOUTS[0], switches)[-1]
    tolerance = TOLERANCES[switches.precision]
    trained = {name: mode["final_loss"] for name, mode in results.items() if mode["ok"]}
    assert trained == pytest.approx(dict.fromkeys(trained, expected), rel=tolerance)
    compared = [layout for layout in LAYOUTS if layout.name in results]
    assert compared
    for layout in compared:
        assert (layout.name in trained) == layout.supports(switches), results[layout.name]


@pytest.mark.soak
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=str)
@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if layout.mode in OTHER_TRAINING],
    ids=lambda layout: layout.name,
)
def test_modes_that_train_differently(
    layout: Layout, switches: Switches, cpu_losses: Reference, tmp_path: Path
) -> None:
    compare_with_cpu(layout, switches, cpu_losses, tmp_path / "run")


REFUSED = [
    pytest.param(mode, settings, reason, id=f"{name}-{column.strip('`')}")
    for name, mode, dims, parallel in rows()
    for column, settings in COLUMNS.items()
    if column in ("`fp16-mixed`", "recompute")
    and (reason := reason_against(mode, dims, parallel, settings))
]


@pytest.mark.parametrize(("mode", "settings", "reason"), REFUSED)
def test_what_a_strategy_does_not_support_is_refused(
    mode: str, settings: Settings, reason: str, tmp_path: Path
) -> None:
    assert mode == "parameter_server", "this test needs the task of the other modes, too"
    args = [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in settings.items()
        for key, value in values.items()
    ]
    done = run_on(
        "cuda", "model=builtin:dlrm", "task=recommend", "dataset=builtin:clicks#200",
        f"parallel.mode={mode}", "parallel.num_gpus=2", f"output_dir={tmp_path / 'run'}", *args,
        expect=2,
    )  # fmt: skip
    assert reason in done.stderr
    assert not (tmp_path / "run").exists()

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


#: Modes of `paceline verify` that need more layers than the model has.
NEED_MORE_LAYERS = {"pipeline-interleaved_1f1b", "pipeline-zero_bubble"}


@pytest.mark.soak
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=str)
@pytest.mark.parametrize(("mode", "world_size"), [("all", 2), ("hybrid", 4)], ids=["all", "hybrid"])
def test_every_mode_of_verify(
    mode: str, world_size: int, switches: Switches, cpu_losses: Reference
) -> None:
    """`paceline verify` trains with all modes in one start of the ranks. A mode is refused only if
    the table of what each strategy supports refuses it."""
    args = (*MODEL, *switches.args, "per_device_train_batch_size=2", "resume=never")
    accumulation = f"gradient_accumulation_steps={NUM_MICRO_BATCHES // world_size}"
    options = ("--steps=3", f"--world-size={world_size}", "--json")
    modes = ["--modes=hybrid"] if mode == "hybrid" else []
    done = run_on("cuda", *args, accumulation, *options, *modes, verb="verify", timeout_s=900)
    certificate = json.loads(done.stdout)
    assert certificate["device"] == "cuda"
    final_losses = {each["mode"]: each["final_loss"] for each in certificate["modes"] if each["ok"]}
    expected = cpu_losses(LAYOUTS[0], switches)[-1]
    tolerance = TOLERANCES[switches.precision]
    assert final_losses == pytest.approx(dict.fromkeys(final_losses, expected), rel=tolerance)
    layouts = {
        # The default stage.
        "deepspeed" if each.name == "deepspeed-2" else each.name: each
        for each in LAYOUTS
        if each.mode not in OTHER_TRAINING and (each.mode == "hybrid") == (mode == "hybrid")
    }
    refused = {name for name, each in layouts.items() if not each.supports(switches)}
    names = {each["mode"] for each in certificate["modes"]}
    assert names >= layouts.keys()
    assert final_losses.keys() == names - refused - NEED_MORE_LAYERS


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

"""Test every strategy on simulated CUDA devices: the losses are those of the CPU device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import losses, report
from cpu_reference import Reference
from device_runs import MODEL, WITH_NCCL, run_on, train_on
from switches import (
    ALL_SWITCHES,
    LAYOUTS,
    LORA_BF16,
    NUM_MICRO_BATCHES,
    QUICK_SWITCHES,
    TOLERANCES,
    Layout,
    Switches,
)

from paceline.parallel.registry import OTHER_TRAINING

pytestmark = pytest.mark.slow

#: Modes of `paceline verify` in the quick set, by what they are combined with.
QUICK_MODES = {
    LORA_BF16: ("ddp", "zero3", "tensor"),
}


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


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def test_losses_are_those_of_the_cpu(layout: Layout, cpu_losses: Reference, tmp_path: Path) -> None:
    compare_with_cpu(layout, quick_switches(layout), cpu_losses, tmp_path / "run")


def verify_on_cuda(
    switches: Switches,
    world_size: int,
    cpu_losses: Reference,
    *options: str,
    variables: Mapping[str, str] | None = None,
    expect: int = 0,
) -> tuple[set[str], set[str]]:
    """Train in modes of `paceline verify`, with one start of the ranks, and compare the losses with
    those of the CPU. Returns the names of the modes that were trained, and of those refused."""
    args = (*MODEL, *switches.args, "per_device_train_batch_size=2", "resume=never")
    accumulation = f"gradient_accumulation_steps={NUM_MICRO_BATCHES // world_size}"
    size = ("--steps=3", f"--world-size={world_size}", "--json")
    settings: dict[str, Any] = {
        "verb": "verify",
        "timeout_s": 900,
        "variables": variables,
        "expect": expect,
    }
    done = run_on("cuda", *args, accumulation, *size, *options, **settings)
    certificate = json.loads(done.stdout)
    assert certificate["device"] == "cuda"
    trained = [mode for mode in certificate["modes"] if mode["ok"]]
    expected, tolerance = cpu_losses(LAYOUTS[0], switches)[-1], TOLERANCES[switches.precision]
    for mode in trained:
        assert mode["final_loss"] == pytest.approx(expected, rel=tolerance), mode
        assert mode["loss_rel_diff"] <= tolerance, mode  # of all steps, from `single`
    names = {mode["mode"] for mode in trained}
    return names, {mode["mode"] for mode in certificate["modes"]} - names


@pytest.mark.parametrize("variables", [{}, WITH_NCCL], ids=["gloo", "nccl"])
@pytest.mark.parametrize("switches", QUICK_MODES, ids=str)
def test_modes_of_verify(
    switches: Switches, variables: dict[str, str], cpu_losses: Reference
) -> None:
    modes = QUICK_MODES[switches]
    options = f"--modes={','.join(modes)}"
    trained, _ = verify_on_cuda(switches, 2, cpu_losses, options, variables=variables)
    assert trained == set(modes)


#: Modes of `paceline verify` that need more layers than the model has.
NEED_MORE_LAYERS = {"pipeline-interleaved_1f1b", "pipeline-zero_bubble"}


@pytest.mark.soak
@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=str)
@pytest.mark.parametrize(("mode", "world_size"), [("all", 2), ("hybrid", 4)], ids=["all", "hybrid"])
def test_every_mode_of_verify(
    mode: str, world_size: int, switches: Switches, cpu_losses: Reference
) -> None:
    """A mode is refused only if the table of what each strategy supports refuses it."""
    options = ["--modes=hybrid"] if mode == "hybrid" else []
    # The axis context divides packed rows only.
    code = 2 if options and not switches.packs else 0
    trained, refused = verify_on_cuda(switches, world_size, cpu_losses, *options, expect=code)
    layouts = {
        # The default stage.
        "deepspeed" if each.name == "deepspeed-2" else each.name: each
        for each in LAYOUTS
        if each.mode not in OTHER_TRAINING and (each.mode == "hybrid") == (mode == "hybrid")
    }
    assert trained | refused >= layouts.keys()
    not_supported = {name for name, each in layouts.items() if not each.supports(switches)}
    if mode == "hybrid" and not switches.packs:
        refused = {name for name in refused if "context" not in name}
    assert refused - NEED_MORE_LAYERS == not_supported


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

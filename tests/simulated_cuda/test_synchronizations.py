"""Test that the host does not wait for the device in a step, with any strategy, apart from logging,
evaluation and checkpoints. Otherwise the device would be idle until the host has queued more work.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import events
from device_runs import train_on
from ranks import run_ranks
from simulated import simulate_values
from switches import LAYOUTS, Layout, Switches
from synchronizations import VARIABLE, Synchronization, read_synchronizations

from paceline.distributed import torch_compat
from paceline.distributed.host_copies import HostCopy, tensor_of
from paceline.parallel.buckets.gradients import squared_norm_of

pytestmark = pytest.mark.slow

#: Steps of the runs, and those of them that are checked: the first ones set up the optimizer and
#: measure memory, and the last one is logged.
NUM_STEPS, CHECKED = 6, range(3, 6)
#: Phases in which the host may wait.
EXCLUDED_PHASES = ("evaluation", "saving", "loading")
SWITCHES = [
    Switches(is_lora=False, precision="bf16-mixed", recomputes=True, packs=True),
    Switches(is_lora=True, precision="fp16-mixed", recomputes=False, packs=False),
]
CASES = [
    pytest.param(
        layout,
        switches,
        id=f"{layout.name}-{switches}",
        marks=[] if layout.name == "zero1" and not switches.is_lora else pytest.mark.soak,
    )
    for layout in LAYOUTS
    for switches in SWITCHES
    if layout.supports(switches)
]


@pytest.mark.parametrize(("layout", "switches"), CASES)
def test_host_does_not_wait_in_a_step(
    layout: Layout, switches: Switches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = record_run(tmp_path, monkeypatch, *layout.args, *switches.args)
    assert any(each.step == NUM_STEPS for each in records), "the last step is logged"
    assert [str(each) for each in records if waits_in_step(each) and not is_of_library(each)] == []


#: Layouts with replicas, with shards, and with replicas that train independently.
LOGGED_LAYOUTS = [layout for layout in LAYOUTS if layout.name in ("ddp", "zero3", "local_sgd")]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=[] if layout.name == "ddp" else pytest.mark.soak)
        for layout in LOGGED_LAYOUTS
    ],
)
def test_host_does_not_wait_in_a_step_that_is_logged(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (*layout.args, *SWITCHES[0].args)
    records = record_run(tmp_path, monkeypatch, *args, logging_steps=1)
    waits = [each for each in records if waits_in_step(each) and not is_after_training(each)]
    assert [str(each) for each in waits] == []
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [
        *range(1, NUM_STEPS + 1)
    ]


def is_after_training(record: Synchronization) -> bool:
    """Return whether this is a wait after the last step, before the checkpoint."""
    return "trainer.py" in record.site and " save" in record.site


def record_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str, logging_steps: int = 100
) -> list[Synchronization]:
    """Train with simulated devices, and return what the ranks waited for."""
    (folder / "records").mkdir()
    monkeypatch.setenv(VARIABLE, str(folder / "records"))
    settings = (f"max_steps={NUM_STEPS}", f"logging_steps={logging_steps}", "max_grad_norm=1.0")
    train_on("cuda", folder / "run", *args, *settings)
    return list(read_synchronizations(folder / "records"))


def waits_in_step(record: Synchronization) -> bool:
    return (
        record.step in CHECKED
        and record.phase not in EXCLUDED_PHASES
        # A step waits for the results of the one before, so the host is at most one step ahead.
        and not record.is_late
    )


def is_of_library(record: Synchronization) -> bool:
    """Return whether this is a wait of DeepSpeed, which Paceline cannot prevent: before an update,
    it reads the norm of the gradient and whether it overflowed, and takes the loss scale as a
    number; at stage 3, it waits for its streams."""
    return "deepspeed/" in str(record)


def wait_in_every_way() -> list[str]:
    device = torch.device("cuda")
    values, mask = torch.arange(4.0, device=device), torch.ones(4, device=device) > 0
    target, event = torch.empty(4, device=device), torch.Event(device)
    event.record()
    copy = HostCopy(values)
    waits = {
        "item": lambda: values[0].item(),
        "tolist": lambda: values.tolist(),
        "bool": lambda: bool(mask[0]),
        "nonzero": lambda: values.nonzero(),
        "mask": lambda: values[mask],
        "repeats": lambda: values.repeat_interleave(torch.ones(4, device=device).int()),
        "to the host": lambda: values.cpu(),
        "to the device": lambda: torch.tensor([1.0, 2.0], device=device),
        "unpinned": lambda: target.copy_(torch.ones(4), non_blocking=True),
        "event": event.synchronize,
        "device": torch.cuda.synchronize,
        "stream": torch.accelerator.current_stream().synchronize,
        "late": copy.read,
        # These do not wait.
        "assign": lambda: values.fill_(2.0).add_(1.0),
        "where": lambda: torch.where(mask, values, 0.0),
        "masked_fill": lambda: values.masked_fill_(mask, 0.0),
        "pinned": lambda: tensor_of([1.0, 2.0], torch.float32, device),
        "start a copy": lambda: HostCopy(values),
    }
    return [name for name, wait in waits.items() if records(wait)]


def records(function: object) -> bool:
    """Return whether a function waits, as recorded."""
    folder = Path(os.environ[VARIABLE])
    for path in folder.glob("*.jsonl"):
        path.unlink()
    assert callable(function)
    function()
    return any(True for _ in read_synchronizations(folder))


def record_waits(_env: object, folder: str) -> list[str]:
    os.environ[VARIABLE] = folder
    simulate_values()
    return wait_in_every_way()


def test_every_kind_of_wait_is_recorded(tmp_path: Path) -> None:
    (waits,) = run_ranks(record_waits, 1, str(tmp_path), init_process_group=False)
    assert waits == [
        "item", "tolist", "bool", "nonzero", "mask", "repeats", "to the host", "to the device",
        "unpinned", "event", "device", "stream", "late",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["int8", pytest.param("topk", marks=pytest.mark.soak)])
def test_compression_does_not_wait(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("parallel.mode=ddp", "parallel.num_gpus=2", f"compression.method={method}")
    records = record_run(tmp_path, monkeypatch, *args)
    waits = [str(each) for each in records if waits_in_step(each) and "compression/" in str(each)]
    assert waits == []


class NormLog(torch_compat.TorchDispatchMode):
    """Records the dtypes of norms, and counts the copies from host memory to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_foreach_norm" in str(func):
            self.dtypes.append(result[0].dtype)
        if "_to_copy" in str(func):
            self.num_copies += result.device.type != args[0].device.type
        return result


def norm_of_offloaded_gradients(_env: object) -> tuple[float, list[torch.dtype], int]:
    simulate_values()
    gradients = [torch.full((70_000,), 0.5), torch.ones(3), torch.full((2,), 2.0, device="cuda")]
    with NormLog() as log:
        squared = squared_norm_of(gradients, torch.device("cuda"))
    return float(squared), log.dtypes, log.num_copies


def test_norm_of_offloaded_gradients() -> None:
    """Those in host memory are added up there, in float32, and copied to the device at once."""
    (result,) = run_ranks(norm_of_offloaded_gradients, 1, init_process_group=False)
    squared, dtypes, num_copies = result
    assert squared == pytest.approx(17_500 + 3 + 8, rel=1e-6)
    assert (dtypes, num_copies) == ([torch.float32, torch.float64], 1)

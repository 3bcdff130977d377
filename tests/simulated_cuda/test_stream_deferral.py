"""Test the mode in which the work of side streams is deferred: a missing wait gives wrong values,
and training has the losses that it has without the mode."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import losses
from device_runs import WITH_NCCL, train_on
from hostnccl import SEED
from planted import STREAM_FAULTS
from planted import VARIABLE as PLANTED
from ranks import run_ranks
from simulated import simulate_values
from stream_order.deferring import VARIABLE, defer
from test_stream_runs import RUNS

pytestmark = pytest.mark.slow

SEEDS = range(20)
#: The runs that are repeated with all seeds.
REPEATED = ("zero3-offload", "ddp-offload", "local_sgd", "diloco-delay", "ddp-topk")
QUICK = ("ddp-offload", 1)
SIZE, DEVICE = 8, torch.device("cuda", 0)


def read_on_the_device(waits: bool) -> float:
    target, source = torch.zeros(SIZE, device=DEVICE), torch.ones(SIZE, pin_memory=True)
    main, side = torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
    if waits:
        main.wait_stream(side)
    return target.sum().item()


def read_on_the_host(waits: bool) -> float:
    source, target = torch.ones(SIZE, device=DEVICE), torch.zeros(SIZE, pin_memory=True)
    side = torch.Stream(DEVICE)
    with side:
        target.copy_(source, non_blocking=True)
        event = side.record_event()
    if waits:
        event.synchronize()
    return target.sum().item()


def write_what_is_read(waits: bool) -> float:
    source, target = torch.ones(SIZE, device=DEVICE), torch.zeros(SIZE, device=DEVICE)
    main, side = torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)
    side.wait_stream(main)
    with side:
        target.add_(source)
    if waits:
        main.wait_stream(side)
    source.zero_()
    main.wait_stream(side)
    return target.sum().item()


def wait_over_a_third_stream(waits: bool) -> float:
    target = torch.zeros(SIZE, device=DEVICE)
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    with first:
        target.add_(1.0)
    if waits:
        second.wait_stream(first)
    torch.accelerator.current_stream(DEVICE).wait_stream(second)
    return target.sum().item()


PROGRAMS: tuple[Callable[[bool], float], ...] = (
    read_on_the_device, read_on_the_host, write_what_is_read, wait_over_a_third_stream,
)  # fmt: skip


def run_programs(_env: object, waits: bool) -> dict[str, list[float]]:
    """Return the result of each program with each seed."""
    simulate_values()
    results: dict[str, list[float]] = {}
    for seed in SEEDS:
        defer(seed)
        for program in PROGRAMS:
            results.setdefault(program.__name__, []).append(program(waits))
            torch.cuda.synchronize(DEVICE)
    return results


@pytest.mark.parametrize("waits", [True, False])
def test_values_are_wrong_only_if_a_wait_is_missing(waits: bool) -> None:
    (results,) = run_ranks(run_programs, 1, waits, init_process_group=False)
    for name, values in results.items():
        assert (set(values) == {float(SIZE)}) == waits, (name, values)


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Return a function that returns the losses of a run whose work is not deferred."""
    known: dict[str, list[float]] = {}

    def losses_of(name: str) -> list[float]:
        if name not in known:
            folder = tmp_path_factory.mktemp("plain") / "run"
            train_on("cuda", folder, *RUNS[name], variables=WITH_NCCL)
            known[name] = losses(folder)
        return known[name]

    return losses_of


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed) if (name, seed) == QUICK else pytest.param(name, seed, marks=pytest.mark.soak)
        for name in RUNS
        for seed in (SEEDS if name in REPEATED else range(1))
    ],
)
def test_losses_do_not_change(
    name: str, seed: int, plain_losses: Callable[[str], list[float]], tmp_path: Path
) -> None:
    variables = {**WITH_NCCL, VARIABLE: str(seed), SEED: str(seed)}
    train_on("cuda", tmp_path / "run", *RUNS[name], "recovery.max_restarts=0", variables=variables)
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(name), rel=1e-6)


@pytest.mark.soak
def test_replicas_differ_if_an_update_does_not_wait(tmp_path: Path) -> None:
    """Without the mode, the same fault changes nothing; see ``test_planted.py``."""
    name = "an update does not wait for the optimizer's state"
    assert name in STREAM_FAULTS
    variables = {**WITH_NCCL, VARIABLE: "0", PLANTED: name}
    args = (*RUNS["ddp-offload"], "recovery.max_restarts=0")
    stderr = train_on("cuda", tmp_path / "run", *args, variables=variables, expect=1)
    assert "the replicas on rank 0" in stderr

"""Times of steps come from events of the device, on which a slow rank shows, and collectives that
autograd's thread issues are known by name."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from simulated import simulate_values

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.event_log import EventLog, read_events
from paceline.core.stop import StopFlag
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator, init_communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.timing.device_timer import DeviceTimer
from paceline.distributed.timing.progress import COLLECTIVE, DEVICE, PROGRESS
from paceline.health import heartbeats
from paceline.health.watchdog import Watchdog

pytestmark = pytest.mark.slow

#: Simulated seconds of a step's computation, what the slow rank needs in addition, and those of a
#: transfer.
COMPUTE_S, SLOWER_S, TRANSFER_S = 0.6, 0.3, 0.01
SLOW_RANK, NUM_STEPS = 1, 30


class SimulatedDevice:
    """A device with a clock of its own, which is a step behind the host."""

    def __init__(self, world: Communicator) -> None:
        self.world, self.now_s = world, 0.0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds

    def all_reduce(self) -> None:
        """Wait until all ranks have reached the collective, as a kernel of NCCL does."""
        with PROGRESS.waiting(COLLECTIVE):
            self.now_s = max(self.world.gather_numbers(self.now_s)) + TRANSFER_S


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def record(self, _stream: torch.Stream) -> None:
        self.time_s, self.step = self.device.now_s, PROGRESS.step

    def query(self) -> bool:
        assert PROGRESS.step is not None
        assert self.step is not None
        return self.step < PROGRESS.step

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        assert self.query(), "the device has passed the event"
        return 1000 * (end.time_s - self.time_s)


def train(env: RankEnv, folder: str) -> list[dict[str, Any]]:
    """Train on simulated devices, of which one is slow, while all hosts are equally fast. Then wait
    for the device for longer than ten steps of the host take. Return the events of rank 0."""
    simulate_values()
    PROGRESS.start(on_cpu=False)
    world = init_communicator(env, "cuda", 60.0)
    log = EventLog(Path(folder) / "events.jsonl" if world.is_rank_zero else None)
    watchdog = Watchdog(RecoveryConfig(hang_warning_s=1.0), 60.0, world, StopFlag())
    watchdog.start()
    watchdog.watch(SimpleNamespace(world=world, has_data=True), log)  # type: ignore[arg-type]
    device = SimulatedDevice(world)
    PROGRESS.timer = DeviceTimer(world.device, lambda: SimulatedEvent(device))
    for step in range(1, NUM_STEPS + 1):
        PROGRESS.begin_step(step)
        PROGRESS.enter("forward")
        time.sleep(0.05)
        device.compute(COMPUTE_S + SLOWER_S * (world.rank == SLOW_RANK))
        PROGRESS.enter("backward")
        device.all_reduce()
        PROGRESS.end_step()
    with PROGRESS.waiting(DEVICE):
        time.sleep(4.0)
    world.barrier()
    watchdog.close()
    log.close()
    return [] if log.path is None else read_events(log.path)


@pytest.mark.parametrize("num_ranks", [3])
def test_slow_device_is_a_straggler_and_no_hang(num_ranks: int, tmp_path: Path) -> None:
    events, *_ = run_ranks(train, num_ranks, str(tmp_path), init_process_group=False)
    assert [event["type"] for event in events if event["type"] in ("straggler", "hang")] == [
        "straggler"
    ]
    straggler = next(event for event in events if event["type"] == "straggler")
    assert straggler["rank"] == SLOW_RANK
    assert straggler["slower_by_s"] == pytest.approx(SLOWER_S, abs=0.02)
    assert max(straggler["share"], key=straggler["share"].get) == "compute_s"


def read_late_steps(_env: RankEnv) -> list[Any]:
    """Run two steps with events of the simulation of CUDA. Return the numbers of steps that are
    known after each, and the times of the first."""
    simulate_values()
    PROGRESS.start(on_cpu=False)
    PROGRESS.timer = DeviceTimer.of(torch.device("cuda", 0))
    assert PROGRESS.timer is not None
    for step in (1, 2):
        PROGRESS.begin_step(step)
        for phase in ("forward", "backward", "optimizer"):
            PROGRESS.enter(phase)
            time.sleep(0.01)
        with PROGRESS.waiting(COLLECTIVE):
            time.sleep(0.02)
        PROGRESS.end_step()
    return [[times.step for times in PROGRESS.steps], PROGRESS.take_device_steps()]


def test_phases_and_waits_add_up_to_the_step_on_the_device() -> None:
    ((numbers, steps),) = run_ranks(read_late_steps, 1, init_process_group=False)
    assert numbers == [1, 2]
    for step in steps:
        assert step.wait_s >= 0.02
        assert step.spent_s.keys() == {"data", "forward", "backward", "optimizer"}
        assert sum(step.spent_s.values()) + step.wait_s == pytest.approx(step.wall_s, abs=1e-6)
        assert step.exposed_wait_s == pytest.approx(step.wait_s, abs=1e-6)


def communicate_in_backward(env: RankEnv) -> list[Any]:
    simulate_values()
    PROGRESS.start(on_cpu=False)
    init_communicator(env, "cuda", 60.0)
    weight = torch.ones(3, device="cuda", requires_grad=True)
    seen: list[Any] = []

    def hook(gradient: torch.Tensor) -> None:
        first = dist.all_reduce(gradient.clone(), async_op=True)
        second = dist.all_reduce(torch.ones(7, device="cuda"), async_op=True)
        seen.append(threading.get_ident() != PROGRESS.thread)
        seen.append(torch_compat.in_backward())
        assert PROGRESS.last is not None
        seen.append(PROGRESS.last.numel)
        with PROGRESS.waiting(COLLECTIVE, PROGRESS.call_of(first)):
            seen.append(heartbeats._waits_for())
        first.wait()
        second.wait()

    weight.register_hook(hook)
    dist.broadcast(torch.zeros(5, device="cuda"), src=0)
    (weight * 2).sum().backward()
    seen.append(torch_compat.in_backward())
    dist.barrier()
    return seen


def test_collectives_in_backward_have_their_names() -> None:
    results = run_ranks(communicate_in_backward, 2, init_process_group=False)
    assert results == [[True, True, 7, "all_reduce number 2 of 2 ranks", False]] * 2


class OtherStreamEvent(SimulatedEvent):
    """An event that the device passes only when ``has_passed`` is set."""

    has_passed = True

    def query(self) -> bool:
        return self.has_passed and super().query()


def read_with_pending_wait(_env: RankEnv) -> list[int]:
    simulate_values()
    PROGRESS.start(on_cpu=False)
    device = SimulatedDevice(Communicator(RankEnv(), torch.device("cuda", 0)))
    PROGRESS.timer = timer = DeviceTimer(device.world.device, lambda: OtherStreamEvent(device))
    PROGRESS.begin_step(1)
    PROGRESS.enter("backward")
    begin = timer.begin_wait()
    timer.end_wait(begin)
    end = timer._current.phases[-1][2][0][1]  # type: ignore[union-attr]
    PROGRESS.end_step()
    PROGRESS.begin_step(2)
    end.has_passed = False
    counts = [len(timer.read())]
    end.has_passed = True
    return [*counts, len(timer.read())]


def test_step_is_read_when_the_waits_of_other_streams_are_done() -> None:
    assert run_ranks(read_with_pending_wait, 1, init_process_group=False) == [[0, 1]]

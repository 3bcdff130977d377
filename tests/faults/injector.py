"""Faults by name, each injected into a real run from outside: into its processes, files or disk.

A fault consists of a trigger, which waits for a moment in the run, and an action. Faults inside of
a rank, such as a flipped bit or a slow rank, are in :mod:`lab_task` and ``tests/faulty_task.py``.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from live import LiveRun

SAVE_STEPS = 4  # steps between two checkpoints, and between two evaluations


# -- triggers: each returns True at its moment, False if the run has ended before

Trigger = Callable[[LiveRun, Random], bool]


def at_any_time(run: LiveRun, random: Random) -> bool:
    """Wait for a random moment: while the ranks start, in a step, in a save, or between them."""
    if not run.wait(run.rank_processes, interval_s=0.05):
        return False
    if random.random() < 0.2:
        time.sleep(random.uniform(0.0, 2.5))
    else:
        number, pause_s = random.randint(1, 2 * SAVE_STEPS + 2), random.uniform(0.0, 0.2)
        if not run.wait(lambda: run.steps() >= number):
            return False
        time.sleep(pause_s)
    return run.process.poll() is None


def in_training(run: LiveRun, random: Random) -> bool:
    number = random.randint(2, 2 * SAVE_STEPS)
    return run.wait(lambda: run.steps() >= number)


def with_two_checkpoints(run: LiveRun, _random: Random) -> bool:
    return run.wait(
        lambda: run.steps() > 0 and len(list((run.folder / "checkpoints").glob("step-*"))) > 1
    )


def at_its_end(run: LiveRun, _random: Random) -> bool:
    """Wait until the run has ended because of a fault in its task."""
    run.wait_for_exit()
    return True


def in_evaluation(run: LiveRun, _random: Random) -> bool:
    """Wait until a step is logged after which the run evaluates, and its result is not."""

    def has_begun() -> bool:
        last = [event for event in run.events() if event["type"] in ("step", "eval")][-1:]
        return bool(last) and last[0]["type"] == "step" and last[0]["step"] % SAVE_STEPS == 0

    return run.wait(has_begun)


def in_saving(run: LiveRun, _random: Random) -> bool:
    checkpoints = run.folder / "checkpoints"
    return run.wait(lambda: run.steps() > 0 and any(checkpoints.glob(".step-*.tmp")))


# -- actions and their targets

Action = Callable[[LiveRun, Random], None]
Target = Callable[[LiveRun, Random], list[psutil.Process]]


def any_rank(run: LiveRun, random: Random) -> list[psutil.Process]:
    ranks = run.rank_processes()
    return [random.choice(ranks)] if ranks else []


def rank_zero(run: LiveRun, _random: Random) -> list[psutil.Process]:
    return [process for number, process in run.ranks().items() if number == 0]


def another_rank(run: LiveRun, random: Random) -> list[psutil.Process]:
    ranks = [process for number, process in sorted(run.ranks().items()) if number != 0]
    return [random.choice(ranks)] if ranks else []


def launcher(run: LiveRun, _random: Random) -> list[psutil.Process]:
    return [run.launcher]


def fork_server(run: LiveRun, _random: Random) -> list[psutil.Process]:
    server = run.server()
    return [] if server is None else [server]


def group(run: LiveRun, _random: Random) -> list[psutil.Process]:
    """Return the process group of the command, which a terminal or `kill -- -PGID` signals."""
    return [
        process for process in run.all_processes() if os.getpgid(process.pid) == run.process.pid
    ]


def every_process(run: LiveRun, _random: Random) -> list[psutil.Process]:
    """Return all processes including loader workers, which Slurm signals."""
    return run.all_processes()


def send(number: signal.Signals, target: Target) -> Action:
    def act(run: LiveRun, random: Random) -> None:
        for process in target(run, random):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    return act


def send_nothing(_run: LiveRun, _random: Random) -> None:
    """Do nothing: the task of the run injects the fault."""


def stop_for(duration_s: float, target: Target) -> Action:
    """Return an action that sends SIGSTOP, and SIGCONT after ``duration_s``."""

    def act(run: LiveRun, random: Random) -> None:
        victims = target(run, random)
        for victim in victims:
            victim.suspend()
        time.sleep(duration_s)
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.resume()

    return act


# -- damage to the latest checkpoint between two attempts


def truncated(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def flipped(shard: Path) -> None:
    with open(shard, "r+b") as handle:
        handle.seek(shard.stat().st_size // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))


def deleted(shard: Path) -> None:
    shard.unlink()


Damage = Callable[[Path], str | None]


def damage_shard(change: Callable[[Path], None]) -> Damage:
    """Return a function that changes one shard of the latest checkpoint in a run's folder, and
    returns a text that the next attempt must report."""

    def apply(folder: Path) -> str:
        newest = max((folder / "checkpoints").glob("step-*"))
        change(max(newest.glob("state-*.safetensors")))
        return str(newest)

    return apply


# -- the faults


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected into a run.

    Args:
        exit_code: exit code of the command after the fault; None if the command continues.
        attempts: number of new attempts that the same command starts after the fault.
        damage: function that damages the run's folder before the command is run again. It may
        return
            a text that the command must report.
        new_args: arguments that replace those of the same keys when the command is run again.
    """

    name: str
    trigger: Trigger
    action: Action
    exit_code: int | None = None
    attempts: int = 0
    damage: Damage | None = None
    new_args: tuple[str, ...] = ()

    def inject(self, run: LiveRun, random: Random) -> bool:
        """Wait for the trigger and inject the fault. Return False if the run has ended before."""
        if not self.trigger(run, random):
            return False
        ending = {rank_process.pid for rank_process in run.rank_processes()}
        self.action(run, random)
        if self.attempts:
            run.begin_attempt_after(ending)
        return True


TARGETS: Mapping[str, Target] = {
    "one rank": another_rank,
    "the launcher": launcher,
    "its process group": group,
    "every process": every_process,
}
PHASES: Mapping[str, Trigger] = {
    "training": in_training,
    "evaluation": in_evaluation,
    "saving": in_saving,
}

_KILLS: Mapping[str, Target] = {
    "a rank": any_rank,
    "rank 0": rank_zero,
    "another rank": another_rank,
    "the fork server": fork_server,
}
_ALL = [
    *(
        Fault(f"kill -9 of {name}", at_any_time, send(signal.SIGKILL, target), attempts=1)
        for name, target in _KILLS.items()
    ),
    Fault(
        "kill -9 of the launcher",
        at_any_time,
        send(signal.SIGKILL, launcher),
        exit_code=-signal.SIGKILL,
    ),
    Fault("SIGSTOP of a rank, 2 s", in_training, stop_for(2.0, any_rank)),
    Fault("SIGSTOP of a rank, for good", in_training, send(signal.SIGSTOP, any_rank), attempts=1),
    *(
        Fault(
            f"SIGTERM to {target_name}, in {phase}",
            trigger,
            send(signal.SIGTERM, target),
            exit_code=128 + signal.SIGTERM,
        )
        for target_name, target in TARGETS.items()
        for phase, trigger in PHASES.items()
    ),
    *(
        Fault(
            f"a shard {change.__name__}",
            with_two_checkpoints,
            send(signal.SIGKILL, launcher),
            exit_code=-signal.SIGKILL,
            damage=damage_shard(change),
        )
        for change in (truncated, flipped, deleted)
    ),
]
#: name → fault
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}

"""Faults by name, each done to a real run from outside: to its processes, its files, its disk.

A fault is a moment and a deed. What a run itself must do wrong (a bit that flips, a rank that is
slow) is in :mod:`lab_task` and ``tests/faulty_task.py``.
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

EVERY = 4  # steps between two saves, and between two evaluations, of the runs of the lab


# -- moments: each True when it has come, False where the run has ended first

Moment = Callable[[LiveRun, Random], bool]


def at_any_time(run: LiveRun, random: Random) -> bool:
    """While the ranks start, in the first steps, or later: in a step, in a save, or between."""
    if not run.wait(run.rank_processes, each_s=0.05):
        return False
    if random.random() < 0.2:
        time.sleep(random.uniform(0.0, 2.5))
    else:
        number, pause_s = random.randint(1, 2 * EVERY + 2), random.uniform(0.0, 0.2)
        if not run.wait(lambda: run.steps() >= number):
            return False
        time.sleep(pause_s)
    return run.process.poll() is None


def in_training(run: LiveRun, random: Random) -> bool:
    number = random.randint(2, 2 * EVERY)
    return run.wait(lambda: run.steps() >= number)


def with_two_checkpoints(run: LiveRun, _random: Random) -> bool:
    return run.wait(
        lambda: run.steps() > 0 and len(list((run.folder / "checkpoints").glob("step-*"))) > 1
    )


def at_its_end(run: LiveRun, _random: Random) -> bool:
    """When the run has ended by what it did itself."""
    run.end()
    return True


def in_evaluation(run: LiveRun, _random: Random) -> bool:
    """From a step at which there is one to the word of how it went."""

    def begun() -> bool:
        last = [event for event in run.events() if event["type"] in ("step", "eval")][-1:]
        return bool(last) and last[0]["type"] == "step" and last[0]["step"] % EVERY == 0

    return run.wait(begun)


def in_saving(run: LiveRun, _random: Random) -> bool:
    checkpoints = run.folder / "checkpoints"
    return run.wait(lambda: run.steps() > 0 and any(checkpoints.glob(".step-*.tmp")))


# -- deeds

Deed = Callable[[LiveRun, Random], None]
Choice = Callable[[LiveRun, Random], list[psutil.Process]]


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
    """The process group of the command, as a terminal or `kill -- -PGID` reaches it."""
    return [process for process in run.everyone() if os.getpgid(process.pid) == run.process.pid]


def every_process(run: LiveRun, _random: Random) -> list[psutil.Process]:
    """As Slurm does it: loader processes too."""
    return run.everyone()


def send(number: signal.Signals, whom: Choice) -> Deed:
    def deed(run: LiveRun, random: Random) -> None:
        for process in whom(run, random):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    return deed


def send_nothing(_run: LiveRun, _random: Random) -> None:
    """What the run does itself is fault enough."""


def stop_for(seconds: float, whom: Choice) -> Deed:
    """SIGSTOP, and SIGCONT after so long; a process that was ended meanwhile needs none."""

    def deed(run: LiveRun, random: Random) -> None:
        victims = whom(run, random)
        for victim in victims:
            victim.suspend()
        time.sleep(seconds)
        for victim in victims:
            with contextlib.suppress(psutil.Error):
                victim.resume()

    return deed


# -- harm to the newest checkpoint between two attempts


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


Harm = Callable[[Path], str | None]


def harm(how: Callable[[Path], None]) -> Harm:
    """Of the newest checkpoint of a run's folder, one shard. Returns what the next attempt must
    say."""

    def do(folder: Path) -> str:
        newest = max((folder / "checkpoints").glob("step-*"))
        how(max(newest.glob("state-*.safetensors")))
        return str(newest)

    return do


# -- the faults


@dataclass(frozen=True)
class Fault:
    """Args: ends: exit code of the command when the fault has had its way; None: the command goes
    on by itself. attempts: so many new attempts follow in the same command. harm: to the folder,
    before the command is given again; may return a word that must be said then. then: words that
    the command is given again with, in the place of those that it had.
    """

    name: str
    moment: Moment
    deed: Deed
    ends: int | None = None
    attempts: int = 0
    harm: Harm | None = None
    then: tuple[str, ...] = ()

    def strike(self, run: LiveRun, random: Random) -> bool:
        """False where the run has ended first."""
        if not self.moment(run, random):
            return False
        ending = {rank_process.pid for rank_process in run.rank_processes()}
        self.deed(run, random)
        if self.attempts:
            run.begin_attempt_after(ending)
        return True


TARGETS: Mapping[str, Choice] = {
    "one rank": another_rank,
    "the launcher": launcher,
    "its process group": group,
    "every process": every_process,
}
MOMENTS: Mapping[str, Moment] = {
    "training": in_training,
    "evaluation": in_evaluation,
    "saving": in_saving,
}

_KILLS: Mapping[str, Choice] = {
    "a rank": any_rank,
    "rank 0": rank_zero,
    "another rank": another_rank,
    "the fork server": fork_server,
}
_ALL = [
    *(
        Fault(f"kill -9 of {name}", at_any_time, send(signal.SIGKILL, whom), attempts=1)
        for name, whom in _KILLS.items()
    ),
    Fault(
        "kill -9 of the launcher", at_any_time, send(signal.SIGKILL, launcher), ends=-signal.SIGKILL
    ),
    Fault("SIGSTOP of a rank, 2 s", in_training, stop_for(2.0, any_rank)),
    Fault("SIGSTOP of a rank, for good", in_training, send(signal.SIGSTOP, any_rank), attempts=1),
    *(
        Fault(
            f"SIGTERM to {target}, in {moment}",
            when,
            send(signal.SIGTERM, whom),
            ends=128 + signal.SIGTERM,
        )
        for target, whom in TARGETS.items()
        for moment, when in MOMENTS.items()
    ),
    *(
        Fault(
            f"a shard {how.__name__}",
            with_two_checkpoints,
            send(signal.SIGKILL, launcher),
            ends=-signal.SIGKILL,
            harm=harm(how),
        )
        for how in (truncated, flipped, deleted)
    ),
]
#: name → fault
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}

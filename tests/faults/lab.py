"""Drives real runs into faults until they end by themselves, and looks at what is left: the digest,
the steps that were lost, processes, ports, files. What came of it is a table."""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import yaml
from commands import digest
from injector import EVERY, FAULTS, Fault
from live import LiveRun, new_token

from paceline.core.event_log import read_events

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fault-injection.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->"

#: Of the runs of the lab: as small as a language model goes.
SMALL = (
    "model=builtin:qwen2-micro", "dataset=builtin:python-docs#120", "parallel.device=cpu",
    "parallel.num_gpus=2", "per_device_train_batch_size=2", "max_length=64", "logging_steps=1",
    f"save_steps={EVERY}", "warmup_steps=3", "recovery.max_restarts=20",
)  # fmt: skip
#: mode → words
MODES = {
    "ddp": ("parallel.mode=ddp",),
    "zero3": ("parallel.mode=zero3",),
    "tensor": ("parallel.mode=tensor",),
    "pipeline": ("parallel.mode=pipeline",),
    "ddp, topk": ("parallel.mode=ddp", "compression.method=topk", "compression.ratio=0.05"),
    "diloco": ("parallel.mode=diloco", "local_sgd.sync_every=6"),
}


def task_words(
    folder: Path, file: str, num_ranks: int, mode: str = "ddp", **task_args: Any
) -> list[str]:
    """Of a run of the task in ``file``, beside this one, whose ranks do wrong by themselves. What
    they do once is kept in ``folder/flags``."""
    (folder / "flags").mkdir(exist_ok=True)
    config = {
        "model": "small",
        "dataset": "made-by-the-task",
        "task": f"{(Path(__file__).parent / file).resolve()}:Faulty",
        "task_args": {"flags": str(folder / "flags"), **task_args},
        "parallel": {"num_gpus": num_ranks, "device": "cpu", "mode": mode},
        "recovery": {"max_restarts": 100},
        "train_args": {
            "per_device_train_batch_size": 5,
            "max_steps": 60,
            "learning_rate": 3e-3,
            "save_steps": EVERY,
            "logging_steps": 1,
        },
    }
    path = folder / f"config-{len(list(folder.glob('config-*')))}.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path)]


@dataclass
class Driven:
    """What became of a run.

    Args:
        tried: fault → how often it was done.
        lost: fault → steps made again, at most: from the step that the next attempt began from to
            the last one logged.
        starts: attempts that came as far as to train.
        digest: of the last checkpoint.
        left: processes, ports and files that were left, in words.
        said: by the last command.
    """

    tried: Counter[str] = field(default_factory=Counter)
    lost: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    digest: str = ""
    left: list[str] = field(default_factory=list)
    output: str = ""


def drive(folder: Path, args: Sequence[str], faults: Sequence[str | Fault], seed: int) -> Driven:
    """Run, and do the faults one after the other, until the run has ended by itself with exit code
    0. The command is given again only where a fault ends it: by a signal, or with the launcher.
    Fails where the run ends otherwise than the fault says, or loses more steps than it may."""
    random, result = Random(seed), Driven()
    pending = [FAULTS[fault] if isinstance(fault, str) else fault for fault in faults]
    scratch, token = Path(tempfile.mkdtemp(prefix="lab-")), new_token()
    ports: set[int] = set()
    struck: list[tuple[float, Fault]] = []
    run, last, message = None, None, None
    try:
        while run is None or last is not None:
            if last is not None:
                args = replaced(args, last.then)
            run = LiveRun(args, folder, scratch, token)
            last = _strike(run, pending, random, struck, ports)
            code, wanted = run.end(), 0 if last is None else last.ends
            assert code == wanted, f"exit code {code}, expected {wanted}\n{run.output[-4000:]}"
            assert message is None or message in run.output, (
                f"{message!r} is missing\n{run.output[-4000:]}"
            )
            message = last.harm(folder) if last is not None and last.harm is not None else None
        result.output, result.left = run.output, left_behind(run, scratch, ports)
    finally:
        if run is not None:
            run.kill()
        shutil.rmtree(scratch, ignore_errors=True)
    result.tried = Counter(fault.name for _, fault in struck)
    result.lost = steps_lost(folder, struck)
    result.starts = sum(
        event["type"] == "run_start" for event in read_events(folder / "events.jsonl")
    )
    result.digest = digest(folder)
    return result


def replaced(args: Sequence[str], replacements: Sequence[str]) -> list[str]:
    """``words``, with those of the same key in their place."""
    keys = {arg.partition("=")[0] for arg in replacements}
    return [arg for arg in args if arg.partition("=")[0] not in keys] + [*replacements]


def _strike(
    run: LiveRun,
    pending: list[Fault],
    random: Random,
    struck: list[tuple[float, Fault]],
    ports: set[int],
) -> Fault | None:
    """One command's faults, up to the one that ends it. None where it shall end by itself."""
    while pending and pending[0].strike(run, random):
        fault = pending.pop(0)
        struck.append((time.time(), fault))
        if fault.ends is not None:
            return fault
        ports |= listening(run)
    return None


def steps_lost(folder: Path, struck: Sequence[tuple[float, Fault]]) -> dict[str, int]:
    """fault → steps made again at most after an attempt that it has cut. Fails where more were lost
    than lie between two saves, and those made while the last save was being written: it is written
    beside the training, and counts when it is whole."""
    lost: dict[str, int] = {}
    last, attempt = 0, 0
    for event in read_events(folder / "events.jsonl"):
        if event["type"] == "step":
            last = event["step"]
        elif event["type"] == "run_start":
            begins, attempt = event["resumed_from_step"] or 0, attempt + 1
            by = [fault for at, fault in struck if at < event["time"]]
            if attempt > 1 and by:
                # the newest save that has surely begun; the one before it is whole
                begun = (last - 1) // EVERY * EVERY
                harmed = EVERY if by[-1].harm is not None else 0
                assert begins >= begun - EVERY - harmed, (
                    f"after {by[-1].name}: from step {last} back to step {begins}"
                )
                lost[by[-1].name] = max(lost.get(by[-1].name, 0), last - begins)
            last = begins
    return lost


def listening(run: LiveRun) -> set[int]:
    ports = set()
    for process in [run.launcher, *run.rank_processes()]:
        try:
            ports |= {
                connection.laddr.port
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
        except psutil.Error:
            continue
    return ports


def left_behind(run: LiveRun, scratch: Path, ports: set[int]) -> list[str]:
    """Processes, ports and temporary files of a run that has ended, in words."""
    _, alive = psutil.wait_procs(run.everyone(), timeout=5.0)
    leftovers = [
        f"process {process.pid}" for process in alive if process.status() != psutil.STATUS_ZOMBIE
    ]
    open_ports = {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    }
    leftovers += [f"port {port}" for port in sorted(ports & open_ports)]
    # torch keeps an empty folder for what it has compiled, on purpose and one for all of a user's
    # programs.
    files = [path for name in ("tmp", "shm") for path in sorted((scratch / name).iterdir())]
    leftovers += [
        str(file.relative_to(scratch))
        for file in files
        if not file.name.startswith("torchinductor_")
    ]
    hidden = [path for path in run.folder.rglob(".*") if path.name not in (".lock", ".launch.lock")]
    return leftovers + [str(path.relative_to(run.folder)) for path in hidden]


# -- the table


@dataclass
class Row:
    """A line of the table. ``lost``: the most steps that had to be made again; None where that is
    no question. ``equal``: whether all runs ended with the bits of the undisturbed one; in words
    where they may not."""

    tried: int = 0
    recovered: int = 0
    lost: int | None = None
    equal: bool | str = True


ROWS: dict[tuple[str, str], Row] = {}
_HEAD = ["fault", "mode", "times tried", "recovered", "steps lost (max)", "bitwise equal"]


def note(fault: str, mode: str, tried: int, *, lost: int | None, equal: bool | str) -> None:
    """Add what a run that has come to its end has shown."""
    row = ROWS.setdefault((fault, mode), Row())
    row.tried += tried
    row.recovered += tried
    row.lost = lost if row.lost is None else max(row.lost, lost or 0)
    row.equal = row.equal and equal


def note_driven(mode: str, result: Driven, equal: bool) -> None:
    for name, tried in result.tried.items():
        note(name, mode, tried, lost=result.lost.get(name, 0), equal=equal)


def table(rows: dict[tuple[str, str], list[str]]) -> str:
    lines = ["| " + " | ".join(_HEAD) + " |", "| --- | --- | ---: | ---: | ---: | --- |"]
    return "\n".join(
        lines + ["| " + " | ".join([*key, *cells]) + " |" for key, cells in sorted(rows.items())]
    )


def cells() -> dict[tuple[str, str], list[str]]:
    by_mode = {}
    for key, row in ROWS.items():
        equal = row.equal if isinstance(row.equal, str) else "yes" if row.equal else "NO"
        by_mode[key] = [
            str(row.tried),
            str(row.recovered),
            "–" if row.lost is None else str(row.lost),
            equal,
        ]
    return by_mode


def write() -> None:
    """Put the rows of this session into the page, in the place of those of the same fault and
    mode."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    known = {}
    for line in text[begin:end].strip().splitlines()[2:]:
        fault, mode, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        known[fault, mode] = rest
    PAGE.write_text(
        text[:begin] + table({**known, **cells()}) + "\n" + text[end:], encoding="utf-8"
    )


def wants_writing() -> bool:
    return "PACELINE_WRITE_TABLE" in os.environ

"""Inject faults into real runs until they finish, check the final digest, the lost steps, and
leftover processes, ports and files, and collect the results in a table."""

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
from injector import FAULTS, SAVE_STEPS, Fault
from live import LiveRun, new_token

from paceline.core.event_log import read_events

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fault-injection.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->"

#: Settings of the runs: the smallest language model.
SMALL = (
    "model=builtin:qwen2-micro", "dataset=builtin:python-docs#120", "parallel.device=cpu",
    "parallel.num_gpus=2", "per_device_train_batch_size=2", "max_length=64", "logging_steps=1",
    f"save_steps={SAVE_STEPS}", "warmup_steps=3", "recovery.max_restarts=20",
)  # fmt: skip
#: mode → arguments
MODES = {
    "ddp": ("parallel.mode=ddp",),
    "zero3": ("parallel.mode=zero3",),
    "tensor": ("parallel.mode=tensor",),
    "pipeline": ("parallel.mode=pipeline",),
    "ddp, topk": ("parallel.mode=ddp", "compression.method=topk", "compression.ratio=0.05"),
    "diloco": ("parallel.mode=diloco", "local_sgd.sync_every=6"),
}


def make_task_args(
    folder: Path, file: str, num_ranks: int, mode: str = "ddp", **task_args: Any
) -> list[str]:
    """Return the arguments of a run of the task in ``file``, which injects faults in its ranks and
    records in ``folder/flags`` which ones."""
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
            "save_steps": SAVE_STEPS,
            "logging_steps": 1,
        },
    }
    path = folder / f"config-{len(list(folder.glob('config-*')))}.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path)]


@dataclass
class LabResult:
    """The result of a run with faults.

    Args:
        injected: fault → number of times that it was injected.
        lost_steps: fault → maximum number of steps that had to be repeated after it.
        starts: number of attempts that started training.
        digest: digest of the last checkpoint.
        leftovers: descriptions of processes, ports and files that were left behind.
        output: output of the last command.
    """

    injected: Counter[str] = field(default_factory=Counter)
    lost_steps: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    digest: str = ""
    leftovers: list[str] = field(default_factory=list)
    output: str = ""


def run_with_faults(
    folder: Path, args: Sequence[str], faults: Sequence[str | Fault], seed: int
) -> LabResult:
    """Train and inject the faults one after another, until the run finishes with exit code 0.

    The command is run again only after a fault that ends it. Fails if the run ends with another
    exit code than the fault implies, or loses more steps than permitted.
    """
    random, result = Random(seed), LabResult()
    pending = [FAULTS[fault] if isinstance(fault, str) else fault for fault in faults]
    scratch, token = Path(tempfile.mkdtemp(prefix="lab-")), new_token()
    ports: set[int] = set()
    injected: list[tuple[float, Fault]] = []
    run, last, message = None, None, None
    try:
        while run is None or last is not None:
            if last is not None:
                args = replace_args(args, last.new_args)
            run = LiveRun(args, folder, scratch, token)
            last = _inject_faults(run, pending, random, injected, ports)
            code, expected = run.wait_for_exit(), 0 if last is None else last.exit_code
            assert code == expected, f"exit code {code}, expected {expected}\n{run.output[-4000:]}"
            assert message is None or message in run.output, (
                f"{message!r} is missing\n{run.output[-4000:]}"
            )
            message = last.damage(folder) if last is not None and last.damage is not None else None
        result.output, result.leftovers = run.output, find_leftovers(run, scratch, ports)
    finally:
        if run is not None:
            run.kill()
        shutil.rmtree(scratch, ignore_errors=True)
    result.injected = Counter(fault.name for _, fault in injected)
    result.lost_steps = count_lost_steps(folder, injected)
    result.starts = sum(
        event["type"] == "run_start" for event in read_events(folder / "events.jsonl")
    )
    result.digest = digest(folder)
    return result


def replace_args(args: Sequence[str], replacements: Sequence[str]) -> list[str]:
    """Return ``args`` with ``replacements`` in place of the arguments of the same keys."""
    keys = {arg.partition("=")[0] for arg in replacements}
    return [arg for arg in args if arg.partition("=")[0] not in keys] + [*replacements]


def _inject_faults(
    run: LiveRun,
    pending: list[Fault],
    random: Random,
    injected: list[tuple[float, Fault]],
    ports: set[int],
) -> Fault | None:
    """Inject faults up to the first one that ends the command, and return that one. Return None if
    the command is to finish normally."""
    while pending and pending[0].inject(run, random):
        fault = pending.pop(0)
        injected.append((time.time(), fault))
        if fault.exit_code is not None:
            return fault
        ports |= find_listening_ports(run)
    return None


def count_lost_steps(folder: Path, injected: Sequence[tuple[float, Fault]]) -> dict[str, int]:
    """Return {fault: maximum number of steps that were repeated after it}.

    Fails if a fault lost more steps than there are between two saves, plus those made while the
    last save was written: saves run in the background, and only complete ones count.
    """
    lost_steps: dict[str, int] = {}
    last, attempt = 0, 0
    for event in read_events(folder / "events.jsonl"):
        if event["type"] == "step":
            last = event["step"]
        elif event["type"] == "run_start":
            resumed_from, attempt = event["resumed_from_step"] or 0, attempt + 1
            earlier = [fault for time_s, fault in injected if time_s < event["time"]]
            if attempt > 1 and earlier:
                # The last save that has certainly begun; the one before it is complete.
                last_save = (last - 1) // SAVE_STEPS * SAVE_STEPS
                damaged = SAVE_STEPS if earlier[-1].damage is not None else 0
                assert resumed_from >= last_save - SAVE_STEPS - damaged, (
                    f"after {earlier[-1].name}: from step {last} back to step {resumed_from}"
                )
                name = earlier[-1].name
                lost_steps[name] = max(lost_steps.get(name, 0), last - resumed_from)
            last = resumed_from
    return lost_steps


def find_listening_ports(run: LiveRun) -> set[int]:
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


def find_leftovers(run: LiveRun, scratch: Path, ports: set[int]) -> list[str]:
    """Return descriptions of the processes, open ports and temporary files that a finished run has
    left behind."""
    _, alive = psutil.wait_procs(run.all_processes(), timeout=5.0)
    leftovers = [
        f"process {process.pid}" for process in alive if process.status() != psutil.STATUS_ZOMBIE
    ]
    open_ports = {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    }
    leftovers += [f"port {port}" for port in sorted(ports & open_ports)]
    # torch intentionally keeps a folder for compiled code, one for each user.
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
    """A row of the table.

    Args:
        lost: maximum number of steps that had to be repeated; None if that does not apply.
        equal: whether all runs ended with bitwise the same weights as the run without faults; a
        text
            if they may differ.
    """

    tried: int = 0
    recovered: int = 0
    lost: int | None = None
    equal: bool | str = True


ROWS: dict[tuple[str, str], Row] = {}
_HEADER = ["fault", "mode", "times tried", "recovered", "steps lost (max)", "bitwise equal"]


def add_row(fault: str, mode: str, tried: int, *, lost: int | None, equal: bool | str) -> None:
    """Add the result of a finished run to the row of this fault and mode."""
    row = ROWS.setdefault((fault, mode), Row())
    row.tried += tried
    row.recovered += tried
    row.lost = lost if row.lost is None else max(row.lost, lost or 0)
    row.equal = row.equal and equal


def add_result(mode: str, result: LabResult, equal: bool) -> None:
    for name, tried in result.injected.items():
        add_row(name, mode, tried, lost=result.lost_steps.get(name, 0), equal=equal)


def format_table(rows: dict[tuple[str, str], list[str]]) -> str:
    lines = ["| " + " | ".join(_HEADER) + " |", "| --- | --- | ---: | ---: | ---: | --- |"]
    return "\n".join(
        lines + ["| " + " | ".join([*key, *cells]) + " |" for key, cells in sorted(rows.items())]
    )


def format_rows() -> dict[tuple[str, str], list[str]]:
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


def write_table() -> None:
    """Write the rows of this session to the documentation page; they replace the rows of the same
    faults and modes."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    existing = {}
    for line in text[begin:end].strip().splitlines()[2:]:
        fault, mode, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        existing[fault, mode] = rest
    table = format_table({**existing, **format_rows()})
    PAGE.write_text(f"{text[:begin]}{table}\n{text[end:]}", encoding="utf-8")


def is_writing_requested() -> bool:
    return "PACELINE_WRITE_TABLE" in os.environ

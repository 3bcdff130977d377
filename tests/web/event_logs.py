"""Write event logs in the format of runs, of any length."""

import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.event_log import EventLog

_PHASES = (
    "data_wait_s",
    "comm_wait_s",
    "data_s",
    "forward_s",
    "backward_s",
    "communication_s",
    "optimizer_s",
    "other_s",
)


def begin(root: Path, *, steps: int = 1000, ranks: int = 2, **extra: Any) -> EventLog:
    """Create the folder of a run, and return its log after ``run_start``."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text("model: builtin:qwen2-micro\ntask: sft\n")
    log = EventLog(root / "events.jsonl")
    fields: dict[str, Any] = {
        "config": {
            "model": "builtin:qwen2-micro",
            "task": "sft",
            "train_args": {"learning_rate": 0.001, "seed": 42},
        },
        "derived": {"steps": steps, "global_batch_size": 16, "world_size": ranks},
        "world_size": ranks,
        "device": "cpu",
        "strategy": "ddp",
        "model": {
            "name": "builtin:qwen2-micro",
            "parameters": 623168,
            "trainable_parameters": 623168,
        },
        "data": {"read": 90, "kept": 85, "truncated": 4, "dropped": {"empty": 5}},
        "versions": {"paceline": "0.1.0"},
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "output_dir": str(root),
        "resumed_from_step": None,
        "mesh": {
            "axes": {"data": ranks},
            "ranks": [
                {"rank": n, "host": "one", "device": f"cpu:{n}", "coordinates": {"data": n}}
                for n in range(ranks)
            ],
        },
    }
    log.emit({"type": "run_start", **fields, **extra})
    return log


def step_fields(step: int, ranks: int = 2, slow_rank: int | None = None) -> dict[str, Any]:
    """Return the fields of a ``step`` event; the loss falls from 9 to 0."""
    rows = []
    for rank in range(ranks):
        delay_s = 0.1 if rank == slow_rank else 0.0
        rows.append({
            "rank": rank, "data_wait_s": 0.01, "comm_wait_s": 0.1 - delay_s,
            "data_s": 0.01 + delay_s, "forward_s": 0.05, "backward_s": 0.1,
            "communication_s": 0.1 - delay_s, "optimizer_s": 0.02, "other_s": 0.02,
            "memory_bytes": 1000 + rank,
        })  # fmt: skip
    return {
        "step": step, "epoch": step / 100, "loss": 9 / step, "grad_norm": 1 / step,
        "learning_rate": 1e-3, "tokens": 4096, "samples": 16, "step_time_s": 0.3,
        "data_wait_s": 0.01, "comm_wait_s": 0.1, "memory_bytes": [1000 + n for n in range(ranks)],
        "ranks": rows, "traffic": {"all_reduce": 4000, "broadcast": 96},
    }  # fmt: skip


def emit_steps(log: EventLog, first: int, last: int, **extra: Any) -> None:
    for step in range(first, last + 1):
        log.emit({"type": "step", **step_fields(step, **extra)})


def finished(root: Path, steps: int = 20, **extra: Any) -> Path:
    """Write a finished run with evaluations, checkpoints and a report."""
    log = begin(root, steps=steps, **extra)
    log.notice("4 samples truncated", "warning")
    for step in range(1, steps + 1):
        emit_steps(log, step, step)
        if step % 10 == 0:
            log.emit(
                {
                    "type": "eval",
                    "step": step,
                    "loss": 8 / step,
                    "count": 100,
                    "wall_s": 0.2,
                    "metrics": {"accuracy": 0.5},
                }
            )
            (root / f"checkpoints/step-{step:08d}").mkdir(parents=True)
            log.emit(
                {
                    "type": "checkpoint",
                    "step": step,
                    "path": str(root / f"checkpoints/step-{step:08d}"),
                    "size_bytes": 1 << 20,
                    "wall_s": 0.1,
                }
            )
    log.emit({"type": "run_end", "status": "done", "step": steps, "reason": None, "wall_s": 12.5})
    log.close()
    (root / "report.json").write_text(
        '{"status": "done", "wall_s": 12.5, "tokens_per_second": 13653.0, "restarts": 0}'
    )
    (root / "report.html").write_text("<!DOCTYPE html><title>report</title><script>1</script>")
    return root


def write_long(path: Path, steps: int, ranks: int, resume_at: int | None = None) -> None:
    """Write a log with ``steps`` steps; 1,000,000 steps with 8 ranks are 2.3 GB.

    Args:
        resume_at: the run fails after this step and resumes from half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = begin(path.parent, steps=steps, ranks=ranks)
    log.close()
    with open(path, "ab", buffering=1 << 22) as handle:
        for line in _long_lines(steps, ranks, resume_at):
            handle.write(line)


def _long_lines(steps: int, ranks: int, resume_at: int | None) -> Iterator[bytes]:
    rng, start_time = random.Random(0), time.time() - steps * 0.25
    rows = []
    # Parts of the lines are created once, so that writing takes less time than the measurement.
    for _ in range(64):
        parts = []
        for rank in range(ranks):
            values = ", ".join(f'"{name}": {rng.random() * 0.1:.6f}' for name in _PHASES)
            parts.append(
                f'{{"rank": {rank}, {values}, "memory_bytes": {rng.randrange(1 << 30, 1 << 34)}}}'
            )
        memory = ", ".join(str(rng.randrange(1 << 30, 1 << 34)) for _ in range(ranks))
        waits = ", ".join(
            f'"{name}": {rng.random() * 0.1:.6f}' for name in ("data_wait_s", "comm_wait_s")
        )
        traffic = '"traffic": {"all_reduce": 4985408}'
        rows.append(
            f'{waits}, "memory_bytes": [{memory}], "ranks": [{", ".join(parts)}], {traffic}'
        )
    step, has_resumed = 0, False
    while step < steps:
        step += 1
        at = start_time + step * 0.25
        loss = 2.0 + 7.0 / (1 + step / 5000) + rng.random() * 0.1
        yield (
            f'{{"time": {at:.6f}, "type": "step", "step": {step}, "epoch": {step / 1000:.3f}, '
            f'"learning_rate": 0.0001, "loss": {loss:.6f}, "grad_norm": {rng.random():.6f}, '
            '"tokens": 4096, "samples": 16, '
            f'"step_time_s": {0.25 + rng.random() * 0.01:.6f}, {rows[step % 64]}}}\n'
        ).encode()
        if step % 10_000 == 0:
            yield (
                f'{{"time": {at:.6f}, "type": "eval", "step": {step}, "loss": {loss:.4f}, '
                '"metrics": {}}\n'
            ).encode()
        if step == resume_at and not has_resumed:
            has_resumed = True
            yield (
                f'{{"time": {at:.6f}, "type": "fault", "step": {step}, "ranks": [1], '
                '"reason": "killed"}\n'
            ).encode()
            step //= 2
            yield (
                f'{{"time": {at:.6f}, "type": "resume", "step": {step}, '
                f'"path": "checkpoints/step-{step:08d}"}}\n'
            ).encode()

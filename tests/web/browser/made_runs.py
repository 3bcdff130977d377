"""Generated logs of runs that a test machine cannot produce: many ranks on hosts with accelerators,
faults, and names that try to inject markup."""

import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import event_logs
from event_logs import begin

from paceline.core.event_log import EventLog
from paceline.sweep.metric import Metric
from paceline.sweep.page import write_page
from paceline.sweep.state import SweepState

HOSTILE = "<img src=x onerror=alert(1)>"
HARM = "<b onclick=alert(1)>&amp; 'quoted'"


def world(
    root: Path, ranks: int = 16, hosts: int = 2, steps: int = 200, slow_rank: int | None = 5
) -> Path:
    """Write a failed ``hybrid`` run (data × shard × tensor) that repeated its third quarter after a
    fault, with every kind of record."""
    log = begin(root, steps=steps, ranks=ranks, **_start(ranks, hosts))
    rng = random.Random(7)
    _steps(log, 1, steps // 2, ranks, slow_rank, rng)
    log.emit({"type": "memory", "ranks": [_memory(rng) for _ in range(ranks)]})
    half = str(root / f"checkpoints/step-{steps // 2:08d}")
    log.emit(
        {
            "type": "checkpoint",
            "step": steps // 2,
            "path": half,
            "size_bytes": 3 << 30,
            "wall_s": 4.2,
            "blocked_s": 0.3,
        }
    )
    sample = {
        "prompt": "What does json.dumps do?",
        "text": f"It writes {HOSTILE} as text.",
        "reference": "Serialize obj to JSON.",
    }
    log.emit({"type": "sample", "step": steps // 2, "samples": [sample]})
    _steps(log, steps // 2 + 1, steps * 3 // 4, ranks, slow_rank, rng)
    log.emit(
        {
            "type": "fault",
            "step": steps * 3 // 4,
            "ranks": [5],
            "hosts": ["node-0"],
            "reason": f"rank 5 was killed {HOSTILE}",
            "restart": 1,
        }
    )
    log.emit(
        {
            "type": "run_start",
            **_start(ranks, hosts),
            "world_size": ranks,
            "resumed_from_step": steps // 2,
        }
    )
    log.emit({"type": "resume", "step": steps // 2, "path": half})
    _steps(log, steps // 2 + 1, steps, ranks, slow_rank, rng)
    log.emit(
        {
            "type": "straggler",
            "rank": 5,
            "host": "node-0",
            "step": steps,
            "slower_by_s": 0.1,
            "share": {},
            "steps": 20,
            "text": "rank 5 is slow",
        }
    )
    log.emit(
        {
            "type": "run_end",
            "status": "failed",
            "step": steps,
            "reason": f"disk full {HOSTILE}",
            "wall_s": 812.0,
        }
    )
    log.close()
    return root


def _start(ranks: int, hosts: int) -> dict[str, Any]:
    sizes = {"data": ranks // 4, "shard": 2, "tensor": 2}
    places = list(product(*(range(size) for size in sizes.values())))
    mesh = [
        {
            "rank": rank,
            "host": f"node-{rank * hosts // ranks}",
            "device": f"cuda:{rank % (ranks // hosts)}",
            "coordinates": dict(zip(sizes, place, strict=True)),
        }
        for rank, place in enumerate(places)
    ]
    memory = {
        "parameters": 7.1e9,
        "gradients": 7.1e9,
        "optimizer": 14.2e9,
        "activations": 9.0e9,
        "total": 37.4e9,
    }
    return {
        "strategy": "hybrid", "device": "cuda",
        "model": {"name": "Qwen/Qwen2-7B", "parameters": 7_615_616_512},
        "mesh": {"axes": sizes, "ranks": mesh}, "pid": 1 << 22,
        "derived": {"steps": 2 * 200, "world_size": ranks},
        "predicted": {"memory_bytes": memory, "traffic_bytes_per_step": 2.9e9},
    }  # fmt: skip


def _memory(rng: random.Random) -> dict[str, float]:
    parts = {
        "parameters": 7.1e9,
        "gradients": 7.1e9,
        "optimizer": 14.2e9,
        "activations": 8.5e9 + rng.random() * 1e9,
    }
    return {**parts, "total": sum(parts.values())}


def _steps(
    log: EventLog, first: int, last: int, ranks: int, slow_rank: int | None, rng: random.Random
) -> None:
    for step in range(first, last + 1):
        rows = [_rank(rank, rank == slow_rank, rng) for rank in range(ranks)]
        log.emit(
            {
                "type": "step",
                "step": step,
                "epoch": step / 400,
                "loss": 2 + 7 / (1 + step / 30) + 0.25 * rng.random(),
                "tokens": 65536,
                "samples": 64,
                "grad_norm": 0.8 + 0.3 * rng.random(),
                "learning_rate": 3e-4 * (1 + math.cos(math.pi * step / 400)) / 2,
                "ranks": rows,
                "step_time_s": 0.6 + 0.1 * rng.random(),
                "data_wait_s": 0.01,
                "comm_wait_s": 0.1,
                "memory_bytes": [38e9] * ranks,
                "traffic": {
                    "all_gather": 1.4e9,
                    "reduce_scatter": 0.9e9,
                    "all_reduce": 0.6e9 + 1e7 * rng.random(),
                },
                "devices": [
                    {"rank": rank, "utilisation": 0.9, "temperature_c": 61, "power_w": 402.0}
                    for rank in range(ranks)
                ],
            }
        )
        if step % 50 == 0:
            log.emit(
                {
                    "type": "eval",
                    "step": step,
                    "loss": 2.2 + 7 / (1 + step / 30),
                    "count": 4096,
                    "wall_s": 3.0,
                    "metrics": {},
                }
            )


def _rank(rank: int, slow: bool, rng: random.Random) -> dict[str, Any]:
    late = 0.1 if slow else 0.0
    return {
        "rank": rank, "data_wait_s": 0.01 + late, "comm_wait_s": 0.12 - late, "data_s": 0.01 + late,
        "forward_s": 0.14, "backward_s": 0.26 + 0.03 * rng.random(),
        "communication_s": 0.13 - late, "optimizer_s": 0.04, "other_s": 0.02, "memory_bytes": 38e9,
    }  # fmt: skip


def older(root: Path) -> Path:
    """Write a run of an older version, without mesh, phases and traffic."""
    log = begin(root, steps=20, ranks=2, mesh=None)
    unknown = dict.fromkeys(("grad_norm", "comm_wait_s", "memory_bytes", "ranks"))
    for step in range(1, 21):
        log.emit(
            {
                "type": "step",
                "step": step,
                "loss": 9 / step,
                "learning_rate": 1e-3,
                "tokens": 100,
                "step_time_s": 0.1,
                "data_wait_s": 0.01,
                **unknown,
            }
        )
    log.emit(
        {
            "type": "run_end",
            "status": "stopped",
            "step": 20,
            "reason": "stopped by SIGTERM",
            "wall_s": 4.0,
        }
    )
    log.close()
    return root


def sweep(folder: Path) -> SweepState:
    """Write a sweep of six runs with its page."""
    state = SweepState(folder, metric=Metric("eval_loss", maximize=False))
    for number in range(6):
        rate, rank = (1e-4, 1e-3, 1e-2)[number % 3], (8, 64)[number % 2]
        run = state.add((f"train_args.learning_rate={rate}", f"lora.rank={rank}"))
        run["status"], run["metric"], run["wall_s"] = "done", 2.0 + number / 10, 12.5
        config = {"lora": {"rank": rank}, "train_args": {"learning_rate": rate}}
        event_logs.finished(folder / run["name"], steps=10, config=config)
    state.importance = {"train_args.learning_rate": 0.8, "lora.rank": 0.2}
    state.save()
    assert state.metric is not None
    write_page(state, state.runs, state.metric)
    return state

"""`paceline explain zero`: which rank stores which shard of the training state, and which
collectives a step needs, measured on real ranks for each stage."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.distributed.call_log import CountedCall
from paceline.explain.calls import collectives_of, spans_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Check,
    DrawnRow,
    Frame,
    Recording,
    Span,
    check_traffic,
    on_step_clock,
)
from paceline.launch.fork_server import OPTIMIZER_MODULE
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = (
    "paceline.explain.training",
    "paceline.strategies.ddp.strategy",
    OPTIMIZER_MODULE,
    "torch.distributed.fsdp",
)
STAGES = {
    "ddp": "DDP: every rank stores everything.",
    "zero1": (
        "ZeRO-1: each rank stores a shard of the optimizer state and updates that shard of the"
        " weights."
    ),
    "zero2": (
        "ZeRO-2: gradients are sharded too. A rank stores its shard of the weights, and all weights"
        " between forward and backward."
    ),
    "zero3": "ZeRO-3: weights are sharded too, and gathered block by block when needed.",
}
KINDS = ("parameters", "gradients", "optimizer")
#: For scalars (Adam's step counts) and padding.
_TOLERANCE = 0.02
_STEPS = 2
_ABOUT = (
    "The training state consists of parameters, gradients and optimizer state (Adam: two numbers"
    " per parameter). Under DDP each rank stores all of it; each stage of ZeRO (Rajbhandari et al.,"
    " 2020) shards one more of the three across the ranks. The bars are measured storage in a small"
    " training with float32 weights and AdamW; dashed lines are the strategy's prediction. The"
    " timeline has one step of each stage, one after another. Ψ is the number of parameters: with"
    " N ranks, a rank sends (N-1)/N of what its collectives move."
)


@dataclass(frozen=True)
class RankStage:
    """The measurements of one stage on one rank.

    Args:
        declared: the strategy's prediction for the rank that uses most: bytes by kind, and the
            ``traffic`` of a step.
        sizes: measured bytes by kind.
        calls: collectives of the last step.
        counted_bytes: bytes sent in the last step, by the traffic counter.
        spans: spans of the last step.
    """

    mode: str
    declared: dict[str, int]
    sizes: dict[str, int]
    calls: list[CountedCall]
    counted_bytes: int
    spans: list[Span]


def record(options: ExplainOptions) -> Recording:
    """Record two steps of a small training under each stage.

    The figures: ``ranks`` and ``stages: [{mode, declared, ranks, traffic, moved}]``, where
    ``declared`` is the strategy's prediction for the rank that uses most, with its ``traffic``, and
    ``ranks`` and ``traffic`` (per step, of the rank that sends most) were measured. ``moved`` is
    what the collectives move, as a multiple of the parameters: 2 for an all-reduce of the
    gradients.
    """
    results: list[list[RankStage]] = run_on_ranks(_measure_rank, options.ranks)
    stages = [list(stage) for stage in zip(*results, strict=True)]
    frames, spans, checks, moved_psi, offset_s = [], [], [], [], 0.0
    for stage in stages:
        moved, _ = on_step_clock(span for rank in stage for span in rank.spans)
        spans += [
            replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)
            for span in moved
        ]
        offset_s += max(span.end_s for span in moved)
        moved_psi.append(_moved_psi(stage, stages[0]))
        frame = _frame(stage, offset_s, moved_psi[-1])
        frames.append(frame)
        traffic = check_traffic([frame], [rank.counted_bytes for rank in stage])
        checks += [replace(traffic, name=f"{stage[0].mode}: {traffic.name}"), _memory_check(stage)]
    return Recording(
        topic="zero",
        title=f"ZeRO, stage by stage, {counted(options.ranks, 'rank')}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(options.ranks)),
        frames=tuple(frames),
        checks=tuple(checks),
        facts=tuple(
            (f"{stage[0].mode}: stored, moved", f"{human_bytes(_fullest(stage))}, {psi:.2f} Ψ")
            for stage, psi in zip(stages, moved_psi, strict=True)
        ),
        spans=tuple(spans),
        figures={
            "ranks": options.ranks,
            "stages": [
                {
                    "mode": stage[0].mode,
                    "declared": stage[0].declared,
                    "ranks": [rank.sizes for rank in stage],
                    "traffic": _sent_bytes(stage),
                    "moved": psi,
                }
                for stage, psi in zip(stages, moved_psi, strict=True)
            ],
        },
    )


def _sent_bytes(stage: list[RankStage]) -> int:
    return max(rank.counted_bytes for rank in stage)


def _moved_psi(stage: list[RankStage], ddp: list[RankStage]) -> float:
    """Return what the collectives of a step move, in units of the parameters."""
    ranks = len(stage)
    return _sent_bytes(stage) * ranks / (ranks - 1) / ddp[0].sizes["parameters"]


def _frame(stage: list[RankStage], time_s: float, moved_psi: float) -> Frame:
    first = stage[0]
    rows = tuple(
        tuple(
            DrawnRow(kind, size_bytes=rank.sizes[kind], expected_bytes=first.declared[kind])
            for kind in KINDS
        )
        for rank in stage
    )
    sent = human_bytes(_sent_bytes(stage))
    total = human_bytes(_fullest(stage))
    return Frame(
        f"{STAGES[first.mode]} {total} on the rank that uses most; {sent} sent per step"
        f" (collectives move {moved_psi:.2f} Ψ).",
        rows,
        phase=first.mode,
        collectives=collectives_of([rank.calls for rank in stage]),
        time_s=time_s,
    )


def _fullest(stage: list[RankStage]) -> int:
    return max(sum(rank.sizes.values()) for rank in stage)


def _memory_check(stage: list[RankStage]) -> Check:
    declared = sum(stage[0].declared[kind] for kind in KINDS)
    is_close = abs(_fullest(stage) - declared) <= _TOLERANCE * declared
    name = f"{stage[0].mode}: measured memory is within 2 % of the prediction"
    return Check(name, declared, _fullest(stage), is_close)


def _measure_rank(world: Communicator) -> list[RankStage]:
    return [_measure(world, mode) for mode in STAGES]


def _measure(world: Communicator, mode: str) -> RankStage:
    from paceline.distributed.communicator import Communicator
    from paceline.distributed.traffic import log_calls
    from paceline.explain import training
    from paceline.models.shape.outline import outline
    from paceline.parallel.cost import Workload
    from paceline.parallel.optimizer_state import optimizer_tensors
    from paceline.parallel.registry import estimate_cost, layout
    from paceline.parallel.save_load import memory_bytes
    from paceline.parallel.state import storage_bytes
    from paceline.parallel.strategy import make_strategy

    config = training.make_config(mode)
    axes = layout(config.parallel, world.size).axes
    meshed = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
    model = training.make_model()
    work = Workload(micro_batches=1, positions=training.ROWS)
    cost = estimate_cost(mode, outline(model, config), axes, work, config)
    strategy = make_strategy(mode, config, meshed)
    placed = strategy.setup(model)
    strategy.setup_optimizer(training.build_adamw)
    batch = training.make_batch(world.rank)
    marks: dict[str, float] = {}

    def micro_step(_: int, module: torch.nn.Module) -> torch.Tensor:
        marks["forward"] = time.perf_counter()
        loss = training.loss_of(module, batch, world.size)
        marks["backward"] = time.perf_counter()
        return loss

    for _ in range(_STEPS):
        world.barrier()
        before = world.traffic.total
        with log_calls() as calls:
            marks["start"] = time.perf_counter()
            strategy.forward_backward(micro_step, 1)
            marks["update"] = time.perf_counter()
            strategy.clip_grad_norm(0.0)
            strategy.optimizer_step(training.apply_update)
            marks["end"] = time.perf_counter()
        counted_bytes = world.traffic.total - before
    optimizer = storage_bytes(optimizer_tensors(strategy.optimizer))
    gradients = storage_bytes(
        [parameter.grad for parameter in placed.parameters() if parameter.grad is not None]
    )
    # The rest at the peak are weights: the rank's shard, and temporarily gathered ones.
    parameters = memory_bytes(strategy) - gradients - optimizer
    world.barrier()
    names = ("forward", "backward", "update", "end")
    spans = [
        Span(world.rank, "compute", name, f"{mode} {name}", marks[name], marks[following])
        for name, following in itertools.pairwise(names)
    ]
    spans += spans_of(world.rank, calls)
    declared = {kind: int(getattr(cost, kind)) for kind in KINDS}
    return RankStage(
        mode,
        {**declared, "traffic": cost.traffic_per_step},
        dict(zip(KINDS, (parameters, gradients, optimizer), strict=True)),
        calls,
        counted_bytes,
        spans,
    )

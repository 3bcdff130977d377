"""`paceline explain zero`: which rank stores which shard of the training state, measured on real
ranks for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.run import ExplainOptions, Recording
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = (
    "paceline.explain.training",
    "paceline.parallel.ddp.strategy",
    "torch._dynamo",
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
_COLORS = {"parameters": "var(--c1)", "gradients": "var(--c2)", "optimizer": "var(--c3)"}
#: For scalars (Adam's step counts) and padding.
_TOLERANCE = 0.02
_STEPS = 2
_ABOUT = (
    "The training state consists of parameters, gradients and optimizer state (Adam: two numbers"
    " per parameter). Under DDP each rank stores all of it; each stage of ZeRO (Rajbhandari et al.,"
    " 2020) shards one more of the three across the ranks. The bars are measured storage in a small"
    " training with float32 weights and AdamW; dashed lines are the strategy's prediction."
)


class Stage(TypedDict):
    """The bytes of a stage of ZeRO. ``declared`` is the strategy's prediction for the rank that
    uses most, with its ``traffic``; ``ranks`` and ``traffic`` (per step, of the rank that sends
    most) were measured."""

    mode: str
    declared: dict[str, int]
    ranks: list[dict[str, int]]
    traffic: int


def record(options: ExplainOptions) -> Recording:
    """Record two steps of a small training under each stage.

    The content: ``topic, ranks, stages`` (see :class:`Stage`) and ``result_ok`` (the
    measured state is within 2 % of the prediction).
    """
    results: list[list[Stage]] = run_on_ranks(_measure_rank, options.ranks)
    stages = [_over_ranks(list(stage)) for stage in zip(*results, strict=True)]
    is_correct = all(_is_as_predicted(stage) for stage in stages)
    title = f"ZeRO, stage by stage, {counted(options.ranks, 'rank')}"
    verdict = "as predicted, within 2 %" if is_correct else "not as predicted"
    lines = [title, _ABOUT]
    for stage in stages:
        lines += ["", _caption(stage)]
        lines += [_memory_line(f"rank {rank}", sizes) for rank, sizes in enumerate(stage["ranks"])]
        lines.append(_memory_line("predicted", stage["declared"]))
    memory = [sizes for stage in stages for sizes in [*stage["ranks"], stage["declared"]]]
    return Recording(
        title=title,
        about=_ABOUT,
        is_correct=is_correct,
        facts=[
            ("Ranks", str(options.ranks)),
            *((f"{stage['mode']}, per rank", human_bytes(_fullest(stage))) for stage in stages),
            ("Measured", verdict),
        ],
        lines=[*lines, "", f"measured state: {verdict.replace('not', 'NOT')}"],
        captions=[_caption(stage) for stage in stages],
        player={
            "kind": "memory",
            "frames": stages,
            "kinds": KINDS,
            "ranks": options.ranks,
            "max_bytes": max(sizes[kind] for sizes in memory for kind in KINDS),
            "colors": _COLORS,
        },
        content={
            "topic": "zero",
            "ranks": options.ranks,
            "stages": stages,
            "result_ok": is_correct,
        },
    )


def _over_ranks(ranks: list[Stage]) -> Stage:
    """Combine the measurements of all ranks for a stage."""
    return Stage(
        mode=ranks[0]["mode"],
        declared=ranks[0]["declared"],
        ranks=[sizes for rank in ranks for sizes in rank["ranks"]],
        traffic=max(rank["traffic"] for rank in ranks),
    )


def _total(sizes: dict[str, int]) -> int:
    return sum(sizes[kind] for kind in KINDS)


def _fullest(stage: Stage) -> int:
    return max(map(_total, stage["ranks"]))


def _is_as_predicted(stage: Stage) -> bool:
    declared = _total(stage["declared"])
    return abs(_fullest(stage) - declared) <= _TOLERANCE * declared


def _caption(stage: Stage) -> str:
    total, traffic = human_bytes(_fullest(stage)), human_bytes(stage["traffic"])
    return f"{STAGES[stage['mode']]} {total} on the rank that uses most; {traffic} sent per step."


def _memory_line(name: str, sizes: dict[str, int]) -> str:
    columns = "   ".join(f"{kind} {human_bytes(sizes[kind]):>9}" for kind in KINDS)
    return f"  {name:<9} {columns}   total {human_bytes(_total(sizes)):>9}"


def _measure_rank(world: Communicator) -> list[Stage]:
    return [_measure(world, mode) for mode in STAGES]


def _measure(world: Communicator, mode: str) -> Stage:
    from paceline.distributed.communicator import Communicator
    from paceline.explain import training
    from paceline.models.shape.outline import outline
    from paceline.parallel.base import make_strategy, optimizer_tensors
    from paceline.parallel.cost import Workload
    from paceline.parallel.registry import estimate_cost, layout
    from paceline.parallel.save_load import memory_bytes
    from paceline.parallel.state import storage_bytes

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
    traffic = 0
    for _ in range(_STEPS):
        before = world.traffic.total
        training.train_step(strategy, batch, world.size)
        traffic = world.traffic.total - before
    optimizer = storage_bytes(optimizer_tensors(strategy.optimizer))
    gradients = storage_bytes(
        [parameter.grad for parameter in placed.parameters() if parameter.grad is not None]
    )
    # The rest at the peak are weights: the rank's shard, and temporarily gathered ones.
    parameters = memory_bytes(strategy) - gradients - optimizer
    world.barrier()
    declared = {kind: getattr(cost, kind) for kind in KINDS}
    return Stage(
        mode=mode,
        declared={**declared, "traffic": cost.traffic_per_step},
        ranks=[dict(zip(KINDS, (parameters, gradients, optimizer), strict=True))],
        traffic=traffic,
    )

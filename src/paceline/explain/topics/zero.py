"""`paceline explain zero`: who holds which part of the training state, measured on real ranks,
stage by stage."""

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
    "ddp": "DDP: every rank holds everything.",
    "zero1": (
        "ZeRO-1: each rank holds a part of the optimizer state and updates that part of the"
        " weights."
    ),
    "zero2": (
        "ZeRO-2: gradients are cut as well. Of the weights a rank keeps its part, and "
        "all of them between forward and backward."
    ),
    "zero3": "ZeRO-3: weights are cut as well, and gathered block by block when they are needed.",
}
KINDS = ("parameters", "gradients", "optimizer")
_COLORS = {"parameters": "var(--c1)", "gradients": "var(--c2)", "optimizer": "var(--c3)"}
# Beside the tensors themselves: scalars (Adam's step counts) and padding.
_TOLERANCE = 0.02
_STEPS = 2
_ABOUT = (
    "Training state is parameters, gradients and what the optimizer keeps (Adam: two numbers a"
    " parameter). Under DDP each rank holds all of it; each stage of ZeRO (Rajbhandari et al.,"
    " 2020) cuts one more of the three into a part for each rank. The bars are the storages"
    " that were really there in a small training with float32 weights and AdamW; dashed is what"
    " the strategy declared before."
)


class Stage(TypedDict):
    """A stage of ZeRO: bytes. ``declared`` is the strategy's estimate before the run, for the
    fullest rank, with its ``traffic``; ``ranks`` and ``traffic`` (of a step, the busiest rank's)
    were measured."""

    mode: str
    declared: dict[str, int]
    ranks: list[dict[str, int]]
    traffic: int


def record(options: ExplainOptions) -> Recording:
    """Record two steps of a small training under each stage.

    The content: ``topic, ranks, stages`` (see :class:`Stage`) and ``result_ok`` (state measured
    within 2 % of what was declared).
    """
    results: list[list[Stage]] = run_on_ranks(_measure_rank, options.ranks)
    stages = [_over_ranks(list(stage)) for stage in zip(*results, strict=True)]
    is_correct = all(_is_as_declared(stage) for stage in stages)
    title = f"ZeRO, stage by stage, {counted(options.ranks, 'rank')}"
    verdict = "as declared, within 2 %" if is_correct else "not as declared"
    lines = [title, _ABOUT]
    for stage in stages:
        lines += ["", _caption(stage)]
        lines += [_memory_line(f"rank {rank}", held) for rank, held in enumerate(stage["ranks"])]
        lines.append(_memory_line("declared", stage["declared"]))
    memory = [held for stage in stages for held in [*stage["ranks"], stage["declared"]]]
    return Recording(
        title=title,
        about=_ABOUT,
        is_correct=is_correct,
        facts=[
            ("Ranks", str(options.ranks)),
            *((f"{stage['mode']}, a rank holds", human_bytes(_fullest(stage))) for stage in stages),
            ("Measured", verdict),
        ],
        lines=[*lines, "", f"measured state: {verdict.replace('not', 'NOT')}"],
        captions=[_caption(stage) for stage in stages],
        player={
            "kind": "memory",
            "frames": stages,
            "kinds": KINDS,
            "ranks": options.ranks,
            "most": max(held[kind] for held in memory for kind in KINDS),
            "colours": _COLORS,
        },
        content={
            "topic": "zero",
            "ranks": options.ranks,
            "stages": stages,
            "result_ok": is_correct,
        },
    )


def _over_ranks(ranks: list[Stage]) -> Stage:
    """One stage, from what each rank measured."""
    return Stage(
        mode=ranks[0]["mode"],
        declared=ranks[0]["declared"],
        ranks=[held for rank in ranks for held in rank["ranks"]],
        traffic=max(rank["traffic"] for rank in ranks),
    )


def _total(held: dict[str, int]) -> int:
    return sum(held[kind] for kind in KINDS)


def _fullest(stage: Stage) -> int:
    return max(map(_total, stage["ranks"]))


def _is_as_declared(stage: Stage) -> bool:
    declared = _total(stage["declared"])
    return abs(_fullest(stage) - declared) <= _TOLERANCE * declared


def _caption(stage: Stage) -> str:
    total, traffic = human_bytes(_fullest(stage)), human_bytes(stage["traffic"])
    return f"{STAGES[stage['mode']]} {total} on the fullest rank; {traffic} sent in a step."


def _memory_line(name: str, held: dict[str, int]) -> str:
    sizes = "   ".join(f"{kind} {human_bytes(held[kind]):>9}" for kind in KINDS)
    return f"  {name:<9} {sizes}   total {human_bytes(_total(held)):>9}"


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
    # What else there is at the fullest moment are weights: a rank's own, and those gathered for a
    # while.
    parameters = memory_bytes(strategy) - gradients - optimizer
    world.barrier()
    declared = {kind: getattr(cost, kind) for kind in KINDS}
    return Stage(
        mode=mode,
        declared={**declared, "traffic": cost.traffic_per_step},
        ranks=[dict(zip(KINDS, (parameters, gradients, optimizer), strict=True))],
        traffic=traffic,
    )

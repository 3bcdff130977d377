"""`paceline explain zero`: who holds which part of the training state, measured on real ranks,
stage by stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator
    from paceline.explain.run import ExplainOptions

Story = dict[str, Any]

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
_COLOURS = {"parameters": "var(--c1)", "gradients": "var(--c2)", "optimizer": "var(--c3)"}
# Beside the tensors themselves: scalars (Adam's step counts) and padding.
_TOLERANCE = 0.02
_STEPS = 2


def tell(options: ExplainOptions) -> Story:
    """Two steps of a small training under each stage.

    Returns: ``topic, ranks, stages: [{mode, declared: {parameters, gradients, optimizer, traffic},
    ranks: [{parameters, gradients, optimizer}], traffic}]`` (bytes; ``declared`` is the strategy's
    own word before the run, for the fullest rank; traffic is of a step, the busiest rank's) and
    ``result_ok`` (state measured within 2 % of what was declared).
    """
    found = run_on_ranks(_measure_rank, options.ranks)
    stages = []
    for mode in STAGES:
        declared = found[0][mode]["declared"]
        held = [one[mode]["held"] for one in found]
        stages.append(
            {
                "mode": mode,
                "declared": declared,
                "ranks": held,
                "traffic": max(one[mode]["traffic"] for one in found),
            }
        )
    return {
        "topic": "zero",
        "ranks": options.ranks,
        "stages": stages,
        "result_ok": all(_as_declared(one) for one in stages),
    }


def _as_declared(stage: dict[str, Any]) -> bool:
    declared = sum(stage["declared"][kind] for kind in KINDS)
    fullest = max(sum(held[kind] for kind in KINDS) for held in stage["ranks"])
    return bool(abs(fullest - declared) <= _TOLERANCE * declared)


def _measure_rank(world: Communicator) -> dict[str, Any]:
    return {mode: _measure(world, mode) for mode in STAGES}


def _measure(world: Communicator, mode: str) -> dict[str, Any]:
    from paceline.distributed.communicator import Communicator
    from paceline.explain import training
    from paceline.models.shape.outline import outline
    from paceline.parallel.base import optimizer_tensors
    from paceline.parallel.cost import Workload
    from paceline.parallel.registry import estimate_cost, layout, make_strategy
    from paceline.parallel.state import storage_bytes

    config = training.make_config(mode)
    axes = layout(config.parallel, world.size).axes
    meshed = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
    model = training.make_model()
    cost = estimate_cost(
        mode,
        outline(model, config),
        axes,
        Workload(micro_batches=1, positions=training.ROWS),
        config,
    )
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
    gradients = storage_bytes([one.grad for one in placed.parameters() if one.grad is not None])
    # What else there is at the fullest moment are weights: a rank's own, and those gathered for a
    # while.
    held = {
        "parameters": strategy.memory_bytes() - gradients - optimizer,
        "gradients": gradients,
        "optimizer": optimizer,
    }
    world.barrier()
    declared = {**{kind: getattr(cost, kind) for kind in KINDS}, "traffic": cost.traffic_per_step}
    return {"held": held, "declared": declared, "traffic": traffic}


def title(story: Story) -> str:
    return f"ZeRO, stage by stage, {counted(story['ranks'], 'rank')}"


def about(story: Story) -> str:
    del story
    return (
        "Training state is parameters, gradients and what the optimizer keeps (Adam: two numbers a"
        " parameter). Under DDP each rank holds all of it; each stage of ZeRO (Rajbhandari et al.,"
        " 2020) cuts one more of the three into a part for each rank. The bars are the storages"
        " that were really there in a small training with float32 weights and AdamW; dashed is what"
        " the strategy declared before."
    )


def _total(held: dict[str, int]) -> int:
    return sum(held[kind] for kind in KINDS)


def facts(story: Story) -> list[tuple[str, str]]:
    found = [("Ranks", str(story["ranks"]))]
    for stage in story["stages"]:
        found.append(
            (f"{stage['mode']}, a rank holds", human_bytes(max(map(_total, stage["ranks"]))))
        )
    return [
        *found,
        ("Measured", "as declared, within 2 %" if story["result_ok"] else "not as declared"),
    ]


def _caption(stage: dict[str, Any]) -> str:
    total, sent = human_bytes(max(map(_total, stage["ranks"]))), human_bytes(stage["traffic"])
    return f"{STAGES[stage['mode']]} {total} on the fullest rank; {sent} sent in a step."


def player(story: Story) -> dict[str, Any]:
    most = max(
        held[kind]
        for stage in story["stages"]
        for held in [*stage["ranks"], stage["declared"]]
        for kind in KINDS
    )
    return {
        "kind": "memory",
        "captions": [_caption(stage) for stage in story["stages"]],
        "frames": story["stages"],
        "kinds": KINDS,
        "ranks": story["ranks"],
        "most": most,
        "colours": _COLOURS,
    }


def text(story: Story) -> str:
    lines = [title(story), about(story)]
    for stage in story["stages"]:
        lines += ["", _caption(stage)]
        rows = [(f"rank {rank}", held) for rank, held in enumerate(stage["ranks"])]
        for name, held in [*rows, ("declared", stage["declared"])]:
            said = "   ".join(f"{kind} {human_bytes(held[kind]):>9}" for kind in KINDS)
            lines.append(f"  {name:<9} {said}   total {human_bytes(_total(held)):>9}")
    lines += [
        "",
        "measured state: "
        + ("as declared, within 2 %" if story["result_ok"] else "NOT as declared"),
    ]
    return "\n".join(lines)

"""`paceline explain zero`: which rank stores which shard of the training state, and which
collectives a step needs, measured on real ranks for each stage."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed.fsdp  # noqa: F401  (imported once, before the ranks are forked)

from paceline.core.files import human_bytes
from paceline.distributed.call_log import CountedCall
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import log_calls
from paceline.explain import training
from paceline.explain.calls import collectives_of, spans_of
from paceline.explain.rank_topic import RankTopic, make_mesh
from paceline.explain.record import Check, DrawnRow, Frame, Span, check_traffic, on_step_clock
from paceline.messages.pages import PageText
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.registry import estimate_cost, layout
from paceline.parallel.save_load import memory_bytes
from paceline.parallel.state import storage_bytes
from paceline.parallel.strategy import make_strategy

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


class ZeROTopic(RankTopic):
    """Record two steps of a small training under each stage.

    The figures: ``ranks`` and ``stages: [{mode, declared, ranks, traffic, moved}]``, where
    ``declared`` is the strategy's prediction for the rank that uses most, with its ``traffic``, and
    ``ranks`` and ``traffic`` (per step, of the rank that sends most) were measured. ``moved`` is
    what the collectives move, as a multiple of the parameters: 2 for an all-reduce of the
    gradients.
    """

    about = _ABOUT

    def run(self) -> None:
        self.stages = [self.gather(_measure(self.world, mode)) for mode in STAGES]
        self.ends_s: list[float] = []
        offset_s = 0.0
        for stage in self.stages:
            moved, _ = on_step_clock(span for rank in stage for span in rank.spans)
            self.spans += [
                replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)
                for span in moved
            ]
            offset_s += max(span.end_s for span in moved)
            self.ends_s.append(offset_s)
        self.title = PageText("ZeRO, stage by stage, {ranks:rank}", ranks=self.world.size)

    def frames(self) -> Iterable[Frame]:
        return map(self._frame, self.stages, self.ends_s)

    def _frame(self, stage: list[RankStage], time_s: float) -> Frame:
        mode, declared = stage[0].mode, stage[0].declared
        rows = tuple(
            tuple(
                DrawnRow(kind, size_bytes=rank.sizes[kind], expected_bytes=declared[kind])
                for kind in KINDS
            )
            for rank in stage
        )
        total, sent = human_bytes(_fullest(stage)), human_bytes(_sent_bytes(stage))
        return Frame(
            PageText(
                "{stage} {total} on the rank that uses most; {sent} sent per step (collectives"
                " move {moved} Ψ).",
                stage=STAGES[mode],
                total=total,
                sent=sent,
                moved=f"{self._moved_psi(stage):.2f}",
            ),
            rows,
            phase=mode,
            collectives=collectives_of([rank.calls for rank in stage]),
            time_s=time_s,
        )

    def _moved_psi(self, stage: list[RankStage]) -> float:
        """Return what the collectives of a step move, in units of the parameters."""
        ranks, parameters_bytes = len(stage), self.stages[0][0].sizes["parameters"]
        return _sent_bytes(stage) * ranks / (ranks - 1) / parameters_bytes

    def check_frames(self, frames: Sequence[Frame]) -> list[Check]:
        checks = []
        for frame, stage in zip(frames, self.stages, strict=True):
            mode = stage[0].mode
            traffic = check_traffic([frame], [rank.counted_bytes for rank in stage])
            measured = _fullest(stage)
            declared = sum(stage[0].declared[kind] for kind in KINDS)
            is_close = abs(measured - declared) <= _TOLERANCE * declared
            name = PageText("{mode}: measured memory is within 2 % of the prediction", mode=mode)
            checks += [
                replace(traffic, name=PageText("{mode}: {check}", mode=mode, check=traffic.name)),
                Check(name, declared, measured, is_close),
            ]
        return checks

    def facts(self) -> dict[str, str]:
        return {
            PageText("{mode}: stored, moved", mode=stage[0].mode): (
                f"{human_bytes(_fullest(stage))}, {self._moved_psi(stage):.2f} Ψ"
            )
            for stage in self.stages
        }

    def add_figures(self) -> None:
        stages = [
            {
                "mode": stage[0].mode,
                "declared": stage[0].declared,
                "ranks": [rank.sizes for rank in stage],
                "traffic": _sent_bytes(stage),
                "moved": self._moved_psi(stage),
            }
            for stage in self.stages
        ]
        self.figures.update(stages=stages)


def _sent_bytes(stage: list[RankStage]) -> int:
    return max(rank.counted_bytes for rank in stage)


def _fullest(stage: list[RankStage]) -> int:
    return max(sum(rank.sizes.values()) for rank in stage)


def _measure(world: Communicator, mode: str) -> RankStage:
    config = training.make_config(mode)
    axes = layout(config.parallel, world.size).axes
    meshed = make_mesh(world, axes)
    model = training.make_model()
    work = Workload(micro_batches=1, positions=training.ROWS)
    cost = estimate_cost(mode, outline(model, config), axes, work, config)
    strategy = make_strategy(mode, config, meshed)
    placed = strategy.setup(model)
    strategy.setup_optimizer(training.build_adamw)
    marks = training.StepMarks(world)
    for _ in range(_STEPS):
        world.barrier()
        before = world.traffic.total
        with log_calls() as calls:
            strategy.forward_backward(marks.micro_step, 1)
            marks.set("update")
            strategy.clip_grad_norm(0.0)
            strategy.optimizer_step(training.apply_update)
            marks.set("end")
        counted_bytes = world.traffic.total - before
    optimizer = storage_bytes(optimizer_tensors(strategy.optimizer))
    gradients = storage_bytes(
        [parameter.grad for parameter in placed.parameters() if parameter.grad is not None]
    )
    # The rest at the peak are weights: the rank's shard, and temporarily gathered ones.
    parameters = memory_bytes(strategy) - gradients - optimizer
    world.barrier()
    spans = [
        Span(
            world.rank,
            "compute",
            name,
            PageText("{mode} {name}", mode=mode, name=name),
            start_s,
            end_s,
        )
        for (name, start_s), (_, end_s) in itertools.pairwise(marks.times_s.items())
    ]
    declared = {kind: int(getattr(cost, kind)) for kind in KINDS}
    return RankStage(
        mode,
        {**declared, "traffic": cost.traffic_per_step},
        dict(zip(KINDS, (parameters, gradients, optimizer), strict=True)),
        calls,
        counted_bytes,
        spans + spans_of(world.rank, calls),
    )

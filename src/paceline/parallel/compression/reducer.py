"""Gradients summed compressed, and what the compression keeps: in the checkpoint, so that a resumed
run goes on to the bit."""

import math
import time
from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch import nn

from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.distributed import torch_compat
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.comm_thread import PendingComm
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.parallel.base import Strategy
from paceline.parallel.comm_profile import CommProfile, CommTimes, StrategyMetrics
from paceline.parallel.compression.base import Compressor, CompressorState, slot_view
from paceline.parallel.compression.checkpoint import PREFIX, dropped
from paceline.parallel.compression.local_adam import SECOND, DirectionOptimizer, LocalAdam
from paceline.parallel.compression.powersgd import PowerSGD
from paceline.parallel.compression.quantize import CastCompressor
from paceline.parallel.compression.settings import momentum_correction, uses_local_moments
from paceline.parallel.compression.signsgd import SignSGD
from paceline.parallel.compression.sizes import BucketShape, TensorSlot, num_rounds, sent_bytes
from paceline.parallel.compression.sparsify import RandomK, TopK
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.ddp.reducer import GradientReducer
from paceline.parallel.gradients import clip_factor
from paceline.parallel.state import StateReader, TensorShard, read_part


class CompressedReducer(GradientReducer):
    """Sums each bucket by a compressor, in a thread beside backward.

    With a moment or momentum of the ranks' own gradients it is late: gradients are clipped first,
    each rank's own, at ``max_norm / √N``, which for N independent gradients is what clipping their
    sum would come to (Lin et al., "Deep Gradient Compression", 2018, section 3.2).
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        args = config.train_args
        self.compressor = make_compressor(
            config.compression, args.seed, momentum_correction(config)
        )
        self.adam = (
            LocalAdam(args.adam_beta2, args.adam_epsilon) if uses_local_moments(config) else None
        )
        self.late = self.adam is not None or momentum_correction(config) > 0
        if self.adam is not None:
            text = (
                f"{config.compression.text} with {args.optim}: each rank keeps Adam's second moment"
                " of its own gradient; what waits to be sent stands for the first moment, so"
                " `adam_beta1` has no meaning"
            )
            self.notices = (("info", text),)
        self.step = 0
        #: How many gradients the moment has seen.
        self.age = 0
        self.buckets: GradientBuckets
        self.shapes: list[BucketShape] = []
        self.states: list[CompressorState] = []
        # what was kept of each bucket when the step began to change it
        self._before: dict[int, list[torch.Tensor]] = {}
        self._decays: list[tuple[list[nn.Parameter], float]] = []
        self._optimizer: torch.optim.Optimizer  # where it is late
        #: Processor seconds of the thread beside backward.
        self.method_s = self.moments_s = 0.0

    def bind(self, buckets: GradientBuckets, trained: Mapping[str, nn.Parameter]) -> None:
        names = {one: name for name, one in trained.items()}
        self.buckets = buckets
        for number, bucket in enumerate(buckets.buckets):
            slots = tuple(
                TensorSlot(names[one], at, tuple(one.shape))
                for one, at in zip(bucket.parameters, bucket.offsets, strict=True)
            )
            self.shapes.append(BucketShape(number, bucket.flat.numel(), slots))
            self.states.append(self._fresh(number))

    def _fresh(self, number: int) -> CompressorState:
        shape, device = self.shapes[number], self.world.device
        state = self.compressor.state_of(shape, device)
        if self.adam is not None:
            self.adam.add_state(state, shape, device)
        return state

    # -- a step
    def start(self, number: int, flat: torch.Tensor) -> PendingComm:
        step, age, shape, state = self.step, self.age + 1, self.shapes[number], self.states[number]

        def work(line: Communicator) -> None:
            begin = time.thread_time()
            values = flat.float()  # the bucket itself, where it is float32
            if self.scaler is not None and self.unscales:
                # what is kept back must not depend on the scale, which changes
                self.scaler.unscale([values])
            self._before[number] = [one.clone() for one in state.held]
            if not bool(values.sum().isfinite()):
                # else an element that is not chosen would wait, and none would hear of it
                values.fill_(math.nan)
            if self.adam is not None:
                self.adam.direct(values, state, age, line.size)
            directed = time.thread_time()
            self.compressor.reduce(values, shape, state, line, step)
            if values is not flat:
                flat.copy_(values)
            self.moments_s += directed - begin
            self.method_s += time.thread_time() - directed

        return self.comm_thread.submit(work)

    def end_step(self) -> None:
        self.step += 1
        self.age += 1

    def finish_step(self, made: bool) -> None:
        if not made and self._before:
            self.age -= 1
            for number, kept in self._before.items():
                for one, before in zip(self.states[number].held, kept, strict=True):
                    one.copy_(before)
        self._before = {}

    def clip_and_sum(self, max_norm: float) -> torch.Tensor:
        """Returns the root of the sum of the ranks' squared norms: the norm of the whole gradient,
        were theirs independent."""
        norm, ranks = self.buckets.norm(), self.world.size
        if max_norm > 0:
            self.buckets.scale(clip_factor(norm, max_norm / math.sqrt(ranks)))
        for parameters, decay in self._decays:
            torch_compat.foreach_add_(
                [one.grad for one in parameters],  # type: ignore[misc]
                [one.detach() for one in parameters],
                alpha=decay / ranks,
            )
        total = norm.square()
        work = self.world.all_reduce(total)
        pending = [self.start(number, flat) for number, flat in enumerate(self.buckets.flats)]
        self.world.wait(work)
        for one in pending:
            self.world.wait(one)
        self.end_step()
        return total.sqrt()

    @property
    def unscales(self) -> bool:
        """:meth:`start` divides the buckets by the loss scale."""
        return not self.late

    @property
    def needs_rollback_on_skip(self) -> bool:
        """True where :meth:`finish_step` has something to put back."""
        return any(state.held for state in self.states)

    def optimizer(self, built: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Where it is late: one that makes the step along what comes out, with the learning rates
        and the weight decay of the one given. Decay that is no decoupled one is added to each
        rank's gradient instead, where its optimizer would have."""
        if not self.late:
            return built
        decoupled = self.config.train_args.optim == "adamw"
        groups = [
            {"params": one["params"], "lr": one["lr"], "weight_decay": one["weight_decay"]}
            for one in built.param_groups
        ]
        if not decoupled:
            self._decays = [
                (one["params"], one["weight_decay"]) for one in groups if one["weight_decay"]
            ]
            groups = [one | {"weight_decay": 0.0} for one in groups]
        self._optimizer = DirectionOptimizer(groups)
        return self._optimizer

    # -- state
    def memory_tensors(self) -> list[torch.Tensor]:
        return [tensor for state in self.states for tensor in state.held]

    def extra_state(self) -> list[TensorShard]:
        found = self._mine()
        if self.world.is_rank_zero:
            numbers = {"step": self.step, "age": self.age, "ranks": self.world.size}
            found += [
                TensorShard.whole(f"{PREFIX}{name}", torch.tensor(value))
                for name, value in numbers.items()
            ]
        return found

    def _mine(self) -> list[TensorShard]:
        """This rank's tensors, live, by parameter: so they do not depend on the size of the
        buckets."""
        rank = f"rank-{self.world.ranks[self.world.rank]}"
        found = []
        for shape, state in zip(self.shapes, self.states, strict=True):
            for slot in shape.slots:
                for kind, flat in state.flats.items():
                    found.append(
                        TensorShard.whole(
                            f"{PREFIX}{slot.name}/{rank}/{kind}", slot_view(slot, flat)
                        )
                    )
            for (name, kind), tensor in state.tensors.items():
                found.append(TensorShard.whole(f"{PREFIX}{name}/{rank}/{kind}", tensor))
        return found

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """What was kept is taken where the same number of ranks kept the same; else it is dropped,
        which a notice says."""
        known = source.tensors()
        step = next((name for name in (f"{PREFIX}step", "schedule/step") if name in known), None)
        self.step = int(source.read(step, (), ())) if step is not None else 0
        mine = self._mine()
        ranks = int(source.read(f"{PREFIX}ranks", (), ())) if f"{PREFIX}ranks" in known else 0
        fits = ranks == self.world.size and all(
            known.get(one.name, (None, None))[1] == one.shape for one in mine
        )
        with uncounted():
            fits = self.world.sum(float(fits))[0] == self.world.size
        if fits:
            for one in mine:
                one.tensor.copy_(read_part(source, one.name, one))
            self.age = int(source.read(f"{PREFIX}age", (), ()))
            if self.late:
                self._optimizer.state.clear()
            return []
        self.states = [self._fresh(number) for number in range(len(self.shapes))]
        self.age = self._take_moments(self._optimizer) if self.late else 0
        return dropped(source) if ranks else []

    def _take_moments(self, optimizer: torch.optim.Optimizer) -> int:
        """The common moment, where a checkpoint had one, is where each rank's begins. Returns its
        age."""
        age = 0
        for bucket, shape, state in zip(
            self.buckets.buckets, self.shapes, self.states, strict=True
        ):
            for parameter, slot in zip(bucket.parameters, shape.slots, strict=True):
                entries = optimizer.state.get(parameter, {})
                if self.adam is not None and SECOND in entries:
                    slot_view(slot, state.flats[SECOND]).copy_(entries[SECOND])
                    age = max(age, int(entries.get("step", 0)))
        optimizer.state.clear()
        return age

    @property
    def comm_profile(self) -> CommProfile:
        line, settings = self.buckets.world, self.config.compression
        sends = [sent_bytes(settings, shape, line.size) for shape in self.shapes]
        rounds = num_rounds(settings) * sum(
            2 if name == "all_reduce" else 1 for one in sends for name in one
        )
        return CommProfile(
            settings.text,
            "leave `compression` out",
            self.buckets.bucket_bytes,
            line,
            line,
            sum(sum(one.values()) for one in sends),
            rounds * (line.size - 1),
            lambda: CommTimes(self.buckets.backward_s, self.method_s, self.moments_s),
            beside=True,
            warmup=settings.warmup_steps if settings.chain[0] in ("topk", "randomk") else 0,
        )

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        residuals = [state.flats["residual"] for state in self.states if "residual" in state.flats]
        norm = None
        if residuals:
            squares = sum(float(one.double().square().sum()) for one in residuals)
            norm = math.sqrt(self.world.sum(squares)[0])
        ranks = self.world.axes.data
        plain = sum(
            all_reduce_bytes(one.numel() * one.element_size(), ranks) for one in self.buckets.flats
        )
        metrics: dict[str, JsonValue] = {
            "method": self.config.compression.text,
            "ratio_sent": plain / sent_bytes if sent_bytes else None,
            "residual_norm": norm,
        }
        return {"communication": metrics}


def make_compressor(settings: Compression, seed: int, momentum: float = 0.0) -> Compressor:
    """The compressor that the config's section asks for.

    Args:
        momentum: of momentum correction, for `topk` and `randomk`.
    """
    method = settings.chain[0]
    if method in ("topk", "randomk"):
        return (TopK if method == "topk" else RandomK)(settings, seed, momentum)
    return {"powersgd": PowerSGD, "signsgd": SignSGD}.get(method, CastCompressor)(settings, seed)


def make_buckets(
    strategy: Strategy, trained: Mapping[str, nn.Parameter], group: Communicator
) -> tuple[GradientBuckets, GradientReducer | None]:
    """Gradients of ``trained`` in buckets, summed over ``group``, and what sums them there as the
    config says; None: the backend's own all-reduce. A collective."""
    config, world = strategy.config, strategy.world
    reducer: GradientReducer | None = None
    if world.axes.data > 1 and config.compression.chain:
        reducer = CompressedReducer(config, world)
    elif world.axes.data > 1 and config.parallel.all_reduce != "native":
        reducer = GradientReducer(config, world)
    cap_bytes = int(config.parallel.bucket_cap_mb * 2**20)
    buckets = GradientBuckets(trained.values(), cap_bytes, group, reducer)
    if reducer is not None:
        reducer.bind(buckets, trained)
        strategy.notices += reducer.notices
    return buckets, reducer

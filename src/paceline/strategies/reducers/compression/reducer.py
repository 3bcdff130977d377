"""Compressed sums of gradients. What the compression keeps is in the checkpoint, so that a resumed
run continues to the bit."""

import math
import time
from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch import nn

from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.core.texts import UserText
from paceline.distributed import torch_compat
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.comm_thread import PendingComm
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.buckets.reducer import GradientReducer
from paceline.parallel.comm_profile import CommProfile, CommTimes, StrategyMetrics
from paceline.parallel.gradient_compression import (
    is_sparse,
    momentum_correction,
    uses_local_moments,
)
from paceline.parallel.gradients import clip_factor
from paceline.parallel.state import (
    COMPRESSION_PREFIX as PREFIX,
)
from paceline.parallel.state import (
    SECOND_MOMENT,
    StateReader,
    TensorShard,
    dropped_state_notices,
    read_part,
)
from paceline.strategies.reducers.compression.base import (
    Compressor,
    CompressorState,
    slot_view,
)
from paceline.strategies.reducers.compression.local_adam import DirectionOptimizer, LocalAdam
from paceline.strategies.reducers.compression.powersgd import PowerSGD
from paceline.strategies.reducers.compression.quantize import CastCompressor, SignSGD
from paceline.strategies.reducers.compression.sizes import (
    BucketShape,
    TensorSlot,
    num_rounds,
    sent_bytes,
)
from paceline.strategies.reducers.compression.sparsify import RandomK, TopK


class CompressedReducer(GradientReducer):
    """Sums each bucket by a compressor, in a thread in parallel with backward.

    With moments or momentum of local gradients it is late: each rank first clips its local gradient
    at ``max_norm / √N``, which for N independent gradients is equivalent to clipping their sum (Lin
    et al., "Deep Gradient Compression", 2018, section 3.2).
    """

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        args = config.train_args
        momentum = momentum_correction(config)
        self.compressor = make_compressor(config.compression, args.seed, momentum)
        self.adam = (
            LocalAdam(args.adam_beta2, args.adam_epsilon) if uses_local_moments(config) else None
        )
        self.late = self.adam is not None or momentum > 0
        if self.adam is not None:
            text = UserText(
                "{compression} with {optim}: each rank keeps Adam's second moment of its local"
                " gradient. The residual replaces the first moment, so `adam_beta1` has no"
                " effect",
                code="moments-kept-by-ranks",
                compression=config.compression.text,
                optim=args.optim,
            )
            self.notices = (("info", text),)
        self.step = 0
        #: Number of gradients in the moment.
        self.age = 0
        self.buckets: GradientBuckets
        self.states: list[CompressorState] = []
        # The state of each bucket before the step changed it.
        self._before: dict[int, list[torch.Tensor]] = {}
        self._decays: list[tuple[list[nn.Parameter], float]] = []
        self._optimizer: torch.optim.Optimizer  # if it is late
        #: Processor seconds of the thread.
        self.method_s = self.moments_s = 0.0

    def bind(self, buckets: GradientBuckets, trained: Mapping[str, nn.Parameter]) -> None:
        names = {parameter: name for name, parameter in trained.items()}
        self.buckets = buckets
        for number, bucket in enumerate(buckets.buckets):
            slots = tuple(
                TensorSlot(names[parameter], offset, tuple(parameter.shape))
                for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
            )
            self.states.append(self._initial_state(BucketShape(number, bucket.flat.numel(), slots)))

    def _initial_state(self, bucket: BucketShape) -> CompressorState:
        state = self.compressor.initial_state(bucket, self.world.device)
        if self.adam is not None:
            self.adam.add_state(state, self.world.device)
        return state

    # -- a step
    def start(self, number: int, flat: torch.Tensor) -> PendingComm:
        step, age, state = self.step, self.age + 1, self.states[number]

        def work(group: Communicator) -> None:
            start_s = time.thread_time()
            values = flat.float()  # the bucket itself, if it is float32
            if self.scaler is not None and self.unscales:
                # The residual must not depend on the loss scale, which changes.
                self.scaler.unscale([values])
            self._before[number] = [tensor.clone() for tensor in state.all_tensors()]
            # A non-finite element that is not chosen would stay hidden in the residual.
            _fill_if_not_finite(values)
            if self.adam is not None:
                self.adam.direct(values, state, age, group.size)
            moments_end_s = time.thread_time()
            self.compressor.reduce(values, state, group, step)
            if values is not flat:
                flat.copy_(values)
            self.moments_s += moments_end_s - start_s
            self.method_s += time.thread_time() - moments_end_s

        return self.comm_thread.submit(work)

    def end_step(self) -> None:
        self.step += 1
        self.age += 1

    def finish_step(self, updated: bool) -> None:
        if not updated and self._before:
            self.age -= 1
            for number, tensors in self._before.items():
                for tensor, before in zip(self.states[number].all_tensors(), tensors, strict=True):
                    tensor.copy_(before)
        self._before = {}

    def clip_and_sum(self, max_norm: float) -> torch.Tensor:
        """Clip, then sum. Returns the root of the sum of the ranks' squared norms, which is the
        norm of the global gradient if the local ones are independent."""
        norm, ranks = self.buckets.norm(), self.world.size
        if max_norm > 0:
            self.buckets.scale(clip_factor(norm, max_norm / math.sqrt(ranks)))
        for parameters, decay in self._decays:
            torch_compat.foreach_add_(
                [parameter.grad for parameter in parameters],  # type: ignore[misc]
                [parameter.detach() for parameter in parameters],
                alpha=decay / ranks,
            )
        total = norm.square()
        work = self.world.all_reduce(total)
        pending = [self.start(number, flat) for number, flat in enumerate(self.buckets.flats)]
        self.world.wait(work)
        for comm in pending:
            self.world.wait(comm)
        self.end_step()
        return total.sqrt()

    @property
    def unscales(self) -> bool:
        """True if :meth:`start` divides the buckets by the loss scale."""
        return not self.late

    @property
    def needs_rollback_on_skip(self) -> bool:
        """True if :meth:`finish_step` has state to restore."""
        return any(state.all_tensors() for state in self.states)

    def optimizer(self, built: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return ``built``; or, if it is late, an optimizer that steps along the result with the
        learning rates and the weight decay of ``built``. Weight decay that is not decoupled is
        added to each rank's gradient instead, as its optimizer would have done."""
        if not self.late:
            return built
        decoupled = self.config.train_args.optim == "adamw"
        groups = []
        for group in built.param_groups:
            decay = group["weight_decay"]
            if decay and not decoupled:
                self._decays.append((group["params"], decay))
            groups.append(
                {
                    "params": group["params"],
                    "lr": group["lr"],
                    "weight_decay": decay if decoupled else 0.0,
                }
            )
        self._optimizer = DirectionOptimizer(groups)
        return self._optimizer

    # -- state
    def memory_tensors(self) -> list[torch.Tensor]:
        return [tensor for state in self.states for tensor in state.all_tensors()]

    def extra_state(self) -> list[TensorShard]:
        shards = self._local_shards()
        if self.world.is_rank_zero:
            numbers = {"step": self.step, "age": self.age, "ranks": self.world.size}
            shards += [
                TensorShard.full(f"{PREFIX}{name}", torch.tensor(value))
                for name, value in numbers.items()
            ]
        return shards

    def _local_shards(self) -> list[TensorShard]:
        """Return this rank's tensors, live, by parameter, so that they do not depend on the size of
        the buckets."""
        rank = f"rank-{self.world.ranks[self.world.rank]}"
        tensors = {}
        for state in self.states:
            for slot in state.bucket.slots:
                for kind, flat in state.flats.items():
                    tensors[f"{PREFIX}{slot.name}/{rank}/{kind}"] = slot_view(slot, flat)
            for (name, kind), tensor in state.tensors.items():
                tensors[f"{PREFIX}{name}/{rank}/{kind}"] = tensor
        return [TensorShard.full(name, tensor) for name, tensor in tensors.items()]

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Load the state if it is from the same number of ranks and the same method. Otherwise it
        is dropped with a notice."""
        stored = source.tensors()
        step = next(
            (name for name in (f"{PREFIX}step", "schedule/step") if name in stored),
            None,
        )
        self.step = int(source.read(step, (), ())) if step is not None else 0
        shards = self._local_shards()
        ranks = int(source.read(f"{PREFIX}ranks", (), ())) if f"{PREFIX}ranks" in stored else 0
        fits = ranks == self.world.size and all(
            stored.get(shard.name, (None, None))[1] == shard.shape for shard in shards
        )
        with uncounted():
            fits = self.world.sum(float(fits))[0] == self.world.size
        if fits:
            for shard in shards:
                shard.tensor.copy_(read_part(source, shard.name, shard))
            self.age = int(source.read(f"{PREFIX}age", (), ()))
            if self.late:
                self._optimizer.state.clear()
            return []
        self.states = [self._initial_state(state.bucket) for state in self.states]
        self.age = self._take_moments(self._optimizer) if self.late else 0
        return dropped_state_notices(source) if ranks else []

    def _take_moments(self, optimizer: torch.optim.Optimizer) -> int:
        """Start each rank's moment from the common one, if the checkpoint has that. Returns its
        age."""
        age = 0
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            for parameter, slot in zip(bucket.parameters, state.bucket.slots, strict=True):
                entries = optimizer.state.get(parameter, {})
                if self.adam is not None and SECOND_MOMENT in entries:
                    view = slot_view(slot, state.flats[SECOND_MOMENT])
                    view.copy_(entries[SECOND_MOMENT])
                    age = max(age, int(entries.get("step", 0)))
        optimizer.state.clear()
        return age

    @property
    def comm_profile(self) -> CommProfile:
        group, settings = self.buckets.world, self.config.compression
        sends = [sent_bytes(settings, state.bucket, group.size) for state in self.states]
        rounds = num_rounds(settings) * sum(
            2 if collective == "all_reduce" else 1 for sent in sends for collective in sent
        )
        return CommProfile(
            settings.text,
            "leave `compression` out",
            self.buckets.bucket_bytes,
            group,
            group,
            sum(sum(sent.values()) for sent in sends),
            rounds * (group.size - 1),
            lambda: CommTimes(self.buckets.backward_s, self.method_s, self.moments_s),
            in_background=True,
            warmup=settings.warmup_steps if is_sparse(settings) else 0,
        )

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        residuals = [state.flats["residual"] for state in self.states if "residual" in state.flats]
        norm = None
        if residuals:
            squares = sum(float(residual.double().square().sum()) for residual in residuals)
            norm = math.sqrt(self.world.sum(squares)[0])
        ranks = self.world.axes.data
        plain = sum(all_reduce_bytes(flat.nbytes, ranks) for flat in self.buckets.flats)
        metrics: dict[str, JsonValue] = {
            "method": self.config.compression.text,
            "ratio_sent": plain / sent_bytes if sent_bytes else None,
            "residual_norm": norm,
        }
        return {"communication": metrics}


def _fill_if_not_finite(values: torch.Tensor) -> None:
    """Set all values to NaN if one of them is not finite, without waiting for a device."""
    is_finite = values.sum().isfinite()
    if values.device.type != "cpu":
        values.masked_fill_(~is_finite, math.nan)
    elif not bool(is_finite):  # a CPU saves the second pass over the values
        values.fill_(math.nan)


_COMPRESSORS: dict[str, type[Compressor]] = {
    "bf16": CastCompressor,
    "fp16": CastCompressor,
    "int8": CastCompressor,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
    "signsgd": SignSGD,
}


def make_compressor(settings: Compression, seed: int, momentum: float = 0.0) -> Compressor:
    """Return the compressor for a section of the config."""
    return _COMPRESSORS[settings.chain[0]](settings, seed, momentum)

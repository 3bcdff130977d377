"""One layout on one machine: memory of the fullest rank, traffic and time of a step. Estimates,
from what each strategy declares."""

from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.models.builtin import resolve_model
from paceline.models.shape.activations import language_activations, language_flops
from paceline.models.shape.record import ModelShape
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.registry import ParallelLayout, check_strategy, estimate_cost
from paceline.parallel.registry import layout as make_layout
from paceline.planner.hardware import Machine
from paceline.planner.model_profile import ModelProfile

#: Share of a device's memory that a run may fill by estimate: the rest is the driver's, the
#: allocator's gaps, and what the model of activations leaves out.
USABLE = 0.9
#: Backward takes two thirds of a step; gradients can be reduced while it goes on.
_OVERLAPPED = 2 / 3


@dataclass(frozen=True)
class MicroBatchProfile:
    """A micro-batch.

    Args:
        positions: tokens on average (samples, where there are no tokens).
        fullest: tokens of the longest samples that can meet in one; what memory must hold.
        label_share: of the tokens carry loss.
        sample: tokens of a sample on average.
        known: from the data; else every sample is taken to have ``max_length`` tokens, all with
            loss.
    """

    positions: float
    fullest: float
    label_share: float = 1.0
    sample: float = 1.0
    known: bool = True
    has_tokens: bool = True

    def text(self) -> str:
        """For a person."""
        if not self.has_tokens:
            return f"{self.positions:,.0f} samples a micro-batch"
        if self.known:
            return (
                f"{self.positions:,.0f} tokens a micro-batch on average, from the tokenised data;"
                f" memory is for the {self.fullest:,.0f} of its longest samples"
            )
        return (
            f"{self.positions:,.0f} tokens a micro-batch: every sample of `max_length`, for the"
            " data is not tokenised yet"
        )


def micro_batch(config: Config) -> MicroBatchProfile:
    """From the tokenised data where they are in the cache, else from ``max_length``."""
    args = config.train_args
    size = args.per_device_train_batch_size
    if config.task not in ("sft", "pretrain"):
        return MicroBatchProfile(size, size, has_tokens=False)
    from paceline.data.text.prepare import TextTask, cached_lengths

    task: TextTask = "pretrain" if config.task == "pretrain" else "sft"
    cached = cached_lengths(config, task, resolve_model)
    if cached is None or len(cached[0]) == 0:
        longest = float(size * args.max_length)
        return MicroBatchProfile(longest, longest, sample=args.max_length, known=False)
    lengths, labels = cached
    size = min(size, len(lengths))
    mean = float(lengths.mean())
    longest_samples = sorted(lengths.tolist())[-size:]
    is_packed = args.packing is not False
    fullest = float(sum(longest_samples) if is_packed else size * longest_samples[-1])
    return MicroBatchProfile(mean * size, fullest, float(labels.sum() / lengths.sum()), mean)


def workload(
    config: Config, described: ModelProfile, batch: MicroBatchProfile, is_cpu: bool
) -> Workload:
    """What a strategy's cost is declared from, beside the model's shape."""
    work = Workload(
        micro_batches=config.train_args.gradient_accumulation_steps,
        positions=batch.positions,
        activation_bytes=described.activation_bytes,
    )
    if described.dims is None:
        return work
    kept = language_activations(
        described.dims,
        config,
        batch.fullest,
        batch.fullest * batch.label_share,
        mask_bytes=4 if is_cpu else 1,
        fused_attention=described.fused_attention,
        longest=min(batch.fullest, config.train_args.max_length),
    )
    blocks = kept.blocks if len(described.shape.blocks) == kept.layers else ()
    return replace(work, activation_bytes=kept.total, block_activation_bytes=blocks)


def micro_batch_flops(config: Config, described: ModelProfile, batch: MicroBatchProfile) -> float:
    """Operations of a micro-batch, forward and backward; where neither widths nor a trial say more,
    6 a parameter and position."""
    if described.dims is not None:
        return language_flops(
            described.dims,
            config,
            batch.positions,
            batch.positions * batch.label_share,
            batch.sample,
        )
    if described.flops:
        return described.flops
    return 6.0 * batch.positions * sum(tensor.numel for tensor in described.shape.parameters)


class MemoryReport(TypedDict):
    """Bytes of one rank, the fullest, in the JSON of a plan; None if the mode is not possible."""

    parameters: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None
    total: int | None


class ModeReport(TypedDict):
    """A mode in the JSON of a plan."""

    mode: str
    fits: bool
    memory_bytes: MemoryReport
    traffic_bytes_per_step: int | None
    traffic_is_bound: bool
    step_time_s: float | None
    reason: str
    strategy: str
    axes: dict[str, int]
    settings: dict[str, str | int]
    traffic_bytes: dict[str, int] | None
    global_batch_size: int | None
    samples_per_second: float | None


@dataclass(frozen=True)
class ModeEstimate:
    """A layout and what it comes to. ``cost`` None: this run cannot be laid out so, for ``reason``.

    Args:
        name: as a person says it: ``zero3``, ``data 2 × tensor 2``, ``deepspeed stage 1``.
        settings: the keys of the section ``parallel`` that ask for it.
        weight_copies: bytes of low-precision copies of float32 weights, which autocast keeps from
            forward to backward.
        step_time_s: estimated; None if the device's rates are not known.
        per_second: samples a second over all ranks, estimated; if ``step_time_s`` is None, it only
            serves to rank modes.
    """

    name: str
    layout: ParallelLayout
    settings: dict[str, str | int]
    fits: bool
    reason: str
    cost: Cost | None = None
    weight_copies: int = 0
    step_time_s: float | None = None
    per_second: float = 0.0
    global_batch_size: int = 0

    @property
    def total(self) -> int:
        return 0 if self.cost is None else self.cost.total + self.weight_copies

    def as_dict(self) -> ModeReport:
        cost = self.cost
        memory = MemoryReport(
            parameters=None, gradients=None, optimizer=None, activations=None, total=None
        )
        if cost is not None:
            memory = MemoryReport(
                parameters=cost.parameters,
                gradients=cost.gradients,
                optimizer=cost.optimizer,
                activations=cost.activations + self.weight_copies,
                total=self.total,
            )
        return ModeReport(
            mode=self.name,
            fits=self.fits,
            memory_bytes=memory,
            traffic_bytes_per_step=None if cost is None else cost.traffic_per_step,
            traffic_is_bound=cost is not None and cost.traffic_is_bound,
            step_time_s=self.step_time_s,
            reason=self.reason,
            strategy=self.layout.strategy,
            axes=asdict(self.layout.axes),
            settings=self.settings,
            traffic_bytes=None if cost is None else dict(cost.traffic),
            global_batch_size=self.global_batch_size or None,
            samples_per_second=self.per_second if self.step_time_s else None,
        )


def free_layout(config: Config, num_devices: int, mode: str) -> ParallelLayout:
    """The layout of a mode, whatever sizes of axes the config names."""
    update = dict.fromkeys(("data", "shard", "tensor", "pipeline"))
    return make_layout(config.parallel.model_copy(update=update), num_devices, mode)


def estimate(
    layout: ParallelLayout,
    config: Config,
    described: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    *,
    stage: int | None = None,
) -> ModeEstimate:
    """What ``layout`` comes to. ``stage``: of DeepSpeed."""
    name, settings = _names(layout, stage)
    update = dict.fromkeys(("data", "shard", "tensor", "pipeline")) | settings
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})
    work = workload(config, described, batch, machine.is_cpu)
    try:
        check_strategy(layout.strategy, config, layout.axes, installed=False)
        _check_cuts(layout, config, described)
        cost = estimate_cost(layout.strategy, described.shape, layout.axes, work, config)
    except ConfigError as error:
        return ModeEstimate(name, layout, settings, False, error.what)
    copies = _weight_copies(described.shape, layout, cost)
    replicas = layout.axes.replicas
    step_s = step_time(
        layout, config, work, cost, machine, micro_batch_flops(config, described, batch)
    )
    samples = replicas * work.micro_batches * config.train_args.per_device_train_batch_size
    shown_step_s = step_s if machine.rates_known else None
    mode = ModeEstimate(
        name, layout, settings, True, "", cost, copies, shown_step_s, samples / step_s, samples
    )
    usable = USABLE * machine.memory_bytes
    if mode.total <= usable:
        return replace(mode, reason=f"{mode.total / machine.memory_bytes:.0%} of the memory")
    over = (
        f"needs {human_bytes(mode.total)}; {human_bytes(usable)} of"
        f" {human_bytes(machine.memory_bytes)} can be used"
    )
    return replace(mode, fits=False, reason=over)


def step_time(
    layout: ParallelLayout,
    config: Config,
    work: Workload,
    cost: Cost,
    machine: Machine,
    flops: float,
) -> float:
    """Seconds of a step: arithmetic, the pipeline's idle time, and the traffic that does not pass
    beside the arithmetic.

    Idle time of a pipeline of p stages and m micro-batches: (p-1)/m of the arithmetic (Narayanan et
    al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2),
    divided by the chunks a rank holds where they are interleaved, and about a third of it with
    zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, table 1, ZB-H1).
    """
    axes = layout.axes
    # all cores for one rank
    speed = machine.flops_s * (machine.count if machine.is_cpu and layout.world_size == 1 else 1)
    compute = work.micro_batches * flops / (axes.tensor * axes.pipeline) / speed
    if axes.pipeline > 1:
        schedule = config.parallel.pipeline_schedule
        idle = (axes.pipeline - 1) / max(1, work.micro_batches)
        idle /= {"interleaved_1f1b": config.parallel.stages_per_rank, "zero_bubble": 3}.get(
            schedule, 1
        )
        compute *= 1 + idle
    traffic = cost.traffic_per_step / machine.link_bytes_s
    # Within a tensor-parallel layer, between stages, and between the threads of `dp` arithmetic
    # waits for the traffic.
    beside = axes.replicas > 1 and axes.tensor == axes.pipeline == 1 and layout.num_processes > 1
    return compute + max(0.0, traffic - (_OVERLAPPED * compute if beside else 0.0))


def _weight_copies(shape: ModelShape, layout: ParallelLayout, cost: Cost) -> int:
    """Autocast multiplies low-precision copies of float32 weights; backward wants them, so all are
    there when it starts. Strategies that hold the weights in low precision, or gather them block by
    block, have none."""
    if not shape.low_bytes or layout.axes.shard > 1:
        return 0
    parts = layout.axes.tensor * layout.axes.pipeline
    matrices = sum(
        tensor.numel
        for tensor in shape.trained
        if len(tensor.shape) > 1 and tensor.element_bytes > shape.low_bytes
    )
    holds_float32 = cost.parameters >= 0.9 * 4 * matrices / parts
    return shape.low_bytes * matrices // parts if holds_float32 else 0


def _check_cuts(layout: ParallelLayout, config: Config, described: ModelProfile) -> None:
    """What the widths say before any strategy has looked at the model."""
    axes, dims, blocks = layout.axes, described.dims, described.shape.blocks
    chunked = config.parallel.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
    stages = axes.pipeline * (config.parallel.stages_per_rank if chunked else 1)
    if axes.pipeline > 1 and stages > len(blocks):
        raise ConfigError(f"{stages} stages are more than the model's {len(blocks)} blocks")
    if axes.pipeline > 1 and config.task == "recommend":
        raise ConfigError(
            "a click model's tables stand side by side: there are no stages to cut it into"
        )
    if axes.tensor > 1 and not described.shape.tensor_plan:
        raise ConfigError(
            "no plan says how this model's layers are cut: give `parallel.tensor_plan`"
        )
    if (
        axes.tensor > 1
        and dims is not None
        and (dims.heads % axes.tensor or dims.key_heads % axes.tensor)
    ):
        raise ConfigError(
            f"{dims.heads} attention heads and {dims.key_heads} of keys and values do not divide"
            f" into {axes.tensor} parts"
        )


def _names(layout: ParallelLayout, stage: int | None) -> tuple[str, dict[str, str | int]]:
    """The mode's name for a person, and the keys of ``parallel`` that ask for it."""
    strategy, text = layout.strategy, layout.axes.text()
    if stage is not None:
        return f"{strategy} stage {stage}", {"mode": strategy, "deepspeed_stage": stage}
    axes = {key: size for key, size in asdict(layout.axes).items() if size > 1}
    if strategy == "hybrid":
        return text, {"mode": strategy, **axes}
    if len(axes) > 1:
        return f"{strategy}, {text}", {"mode": strategy, **axes}
    return strategy, {"mode": strategy}

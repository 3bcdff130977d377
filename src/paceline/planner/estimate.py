"""Estimate one layout on one machine: memory of the rank that uses most, traffic and time of a
step, from the costs that each strategy declares."""

from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.models.builtin import resolve_model
from paceline.models.kernels.attention_choice import joins_samples
from paceline.models.kinds import reads_images
from paceline.models.shape.activations import Activations, WeightPrecision, language_activations
from paceline.models.shape.block_memory import FLOAT32_BYTES
from paceline.models.shape.flops import float8_flops, language_flops
from paceline.models.shape.record import ModelShape
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.registry import ParallelLayout, check_strategy, estimate_cost
from paceline.parallel.registry import layout as make_layout
from paceline.planner.hardware import Machine
from paceline.planner.model_profile import ModelProfile

#: Strategies in which every rank uses all frozen weights in place.
_MAPS_FROZEN_WEIGHTS = ("ddp", "zero1", "zero2", "local_sgd", "diloco")
#: Share of a device's memory that an estimate may fill. The rest is for the driver, fragmentation,
#: and what the activation model leaves out.
USABLE = 0.9
#: Backward takes two thirds of a step; gradients can be reduced during it.
_OVERLAPPED = 2 / 3


@dataclass(frozen=True)
class MicroBatchProfile:
    """The size of a micro-batch.

    Args:
        positions: mean number of tokens (of samples, if there are no tokens).
        fullest: tokens of the longest samples that can share one; what memory must hold.
        label_share: share of the tokens that have a loss.
        sample: mean number of tokens of a sample.
        lengths: tokens of each sample of the fullest micro-batch.
        known: counted in the data; else every sample has ``max_length`` tokens, all with loss.
    """

    positions: float
    fullest: float
    label_share: float = 1.0
    sample: float = 1.0
    known: bool = True
    has_tokens: bool = True
    lengths: tuple[int, ...] = ()

    def text(self) -> str:
        """Return the note in the plan."""
        if not self.has_tokens:
            return f"{self.positions:,.0f} samples per micro-batch"
        if self.known:
            return (
                f"{self.positions:,.0f} tokens per micro-batch on average, from the tokenized data;"
                f" memory is for the {self.fullest:,.0f} tokens of its longest samples"
            )
        return (
            f"{self.positions:,.0f} tokens per micro-batch: every sample has `max_length` tokens,"
            " because the data is not tokenized yet"
        )


def micro_batch(config: Config) -> MicroBatchProfile:
    """Measure the micro-batch in the tokenized data if it is cached; else assume ``max_length``."""
    args = config.train_args
    size = args.per_device_train_batch_size
    if config.task not in CAUSAL_TASKS:
        return MicroBatchProfile(size, size, has_tokens=False)
    from paceline.data.text.prepare import cached_lengths, text_task

    task = text_task(config)
    if reads_images(config):
        task = "vision"
    cached = cached_lengths(config, task, resolve_model)
    if cached is None or len(cached[0]) == 0:
        rows = (args.max_length,) * size * (2 if task == "pairs" else 1)
        longest = float(sum(rows))
        return MicroBatchProfile(
            longest, longest, sample=args.max_length, known=False, lengths=rows
        )
    lengths, labels = cached
    size = min(size, len(lengths))
    mean = float(lengths.mean())
    longest_samples = sorted(lengths.tolist())[-size:]
    is_packed = args.packing is not False
    fullest = float(sum(longest_samples) if is_packed else size * longest_samples[-1])
    label_share = float(labels.sum() / lengths.sum())
    if args.packs_rows:
        # Rows are almost full, whatever the lengths of the samples are.
        fullest = float(size * args.max_length)
        mean = float(args.max_length)
        longest_samples = [args.max_length] * size
    return MicroBatchProfile(
        mean * size, fullest, label_share, mean, lengths=tuple(longest_samples)
    )


def workload(
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    layout: ParallelLayout,
    is_cpu: bool,
) -> Workload:
    """Return what a strategy's cost depends on besides the model's shape."""
    work = Workload(config.train_args.gradient_accumulation_steps, batch.positions)
    if profile.dims is None:
        copies = _weight_copies(profile.shape, layout)
        return replace(
            work,
            activations=Activations(
                ends=profile.activation_bytes + copies, precision=WeightPrecision(FLOAT32_BYTES)
            ),
        )
    activations = language_activations(
        profile.dims,
        config,
        batch.fullest,
        batch.fullest * batch.label_share,
        mask_bytes=4 if is_cpu else 1,
        fused_attention=profile.fused_attention,
        row=batch.fullest if config.train_args.packing is not False else max(batch.lengths),
        joined=joins_samples(config, "cpu" if is_cpu else "cuda"),
        low_weights=layout.has_low_weights,
        tensor_ranks=layout.axes.tensor,
    )
    activations = activations.of_model(len(profile.shape.blocks))
    on_host = activations.on_host if activations.offloads else 0
    return replace(work, activations=activations, host_activation_bytes=on_host)


def micro_batch_flops(config: Config, profile: ModelProfile, batch: MicroBatchProfile) -> float:
    """Return the operations of forward and backward of a micro-batch. If neither dimensions nor a
    trial are known: 6 per parameter and position.

    Operations in float8 count half: data sheets of NVIDIA's GPUs give twice the rate of bfloat16.
    """
    if profile.dims is not None:
        labels = batch.positions * batch.label_share
        flops = language_flops(profile.dims, config, batch.positions, labels, batch.sample)
        return flops - float8_flops(profile.dims, config, batch.positions) / 2
    if profile.flops:
        return profile.flops
    return 6.0 * batch.positions * profile.shape.num_parameters


class MemoryReport(TypedDict):
    """Bytes on the rank that uses most, in the JSON of a plan; None if the mode is not possible."""

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
    host_memory_bytes: int | None
    host_traffic_bytes: dict[str, int] | None


@dataclass(frozen=True)
class ModeEstimate:
    """The estimate of a layout.

    Args:
        name: for users: ``zero3``, ``data 2 × tensor 2``, ``deepspeed stage 1``.
        settings: the keys of the section ``parallel`` that select it.
        cost: None if this run is not possible with the layout, because of ``reason``.
        shared_bytes: bytes of frozen weights that this rank shares with others, less its part.
        step_time_s: estimated; None if the device's rates are not known.
        per_second: estimated samples per second over all ranks; if ``step_time_s`` is None, it only
            serves to rank modes.
    """

    name: str
    layout: ParallelLayout
    settings: dict[str, str | int]
    fits: bool
    reason: str
    cost: Cost | None = None
    shared_bytes: int = 0
    step_time_s: float | None = None
    per_second: float = 0.0
    global_batch_size: int = 0

    @property
    def total(self) -> int:
        if self.cost is None:
            return 0
        return self.cost.total - self.shared_bytes

    def as_dict(self) -> ModeReport:
        cost = self.cost
        return ModeReport(
            mode=self.name,
            fits=self.fits,
            memory_bytes=MemoryReport(
                parameters=None if cost is None else cost.parameters - self.shared_bytes,
                gradients=None if cost is None else cost.gradients,
                optimizer=None if cost is None else cost.optimizer,
                activations=None if cost is None else cost.activations,
                total=None if cost is None else self.total,
            ),
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
            host_memory_bytes=None if cost is None else cost.host,
            host_traffic_bytes=None if cost is None else dict(cost.host_traffic),
        )


def free_layout(config: Config, num_devices: int, mode: str) -> ParallelLayout:
    """Return the layout of a mode, ignoring the sizes of axes that the config sets."""
    update = dict.fromkeys(("data", "shard", "tensor", "pipeline"))
    return make_layout(config.parallel.model_copy(update=update), num_devices, mode)


def estimate(
    layout: ParallelLayout,
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    *,
    stage: int | None = None,
) -> ModeEstimate:
    """Estimate ``layout``. ``stage``: of DeepSpeed."""
    name, settings = _names(layout, stage)
    update = dict.fromkeys(("data", "shard", "tensor", "pipeline")) | settings
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})
    work = workload(config, profile, batch, layout, machine.is_cpu)
    try:
        check_strategy(layout.strategy, config, layout.axes, installed=False)
        _check_divisible(layout, config, profile)
        cost = estimate_cost(layout.strategy, profile.shape, layout.axes, work, config)
    except ConfigError as error:
        return ModeEstimate(name, layout, settings, False, error.what)
    if cost.on_accelerator is not None and not machine.is_cpu:
        cost = cost.on_accelerator
    cost = _with_host_activations(cost, work)
    replicas = layout.axes.replicas
    step_s = step_time(
        layout, config, work, cost, machine, micro_batch_flops(config, profile, batch)
    )
    samples = replicas * work.micro_batches * config.train_args.per_device_train_batch_size
    shown_step_s = step_s if machine.rates_known else None
    shared = _shared_bytes(layout, profile, machine)
    rate = samples / step_s
    mode = ModeEstimate(name, layout, settings, True, "", cost, shared, shown_step_s, rate, samples)
    usable = USABLE * machine.memory_bytes
    if mode.total <= usable:
        return replace(mode, reason=f"{mode.total / machine.memory_bytes:.0%} of the memory")
    reason = (
        f"needs {human_bytes(mode.total)}; {human_bytes(usable)} of"
        f" {human_bytes(machine.memory_bytes)} can be used"
    )
    return replace(mode, fits=False, reason=reason)


def _with_host_activations(cost: Cost, work: Workload) -> Cost:
    """Return the cost with the activations that are in host memory."""
    size = work.host_activation_bytes
    if not size:
        return cost
    traffic = {**cost.host_traffic, "activations": 2 * work.micro_batches * size}
    return replace(cost, host=cost.host + size, host_traffic=traffic)


def _host_time(cost: Cost, machine: Machine, compute_s: float) -> float:
    """Return the seconds of the copies to and from the host that do not overlap with computation.

    Activations leave during forward, a third of the computation, and return during backward.
    Parameters and gradients are copied in both. The state of the optimizer is copied while nothing
    else is computed, in both directions at once.
    """
    link = machine.host_link_bytes_s
    each_way = cost.host_traffic.get("activations", 0) / 2 / link
    seconds = max(0.0, each_way - compute_s / 3) + max(0.0, each_way - compute_s * 2 / 3)
    seconds += max(0.0, cost.host_traffic.get("parameters", 0) / link - compute_s)
    return seconds + cost.host_traffic.get("optimizer", 0) / 2 / link


def step_time(
    layout: ParallelLayout,
    config: Config,
    work: Workload,
    cost: Cost,
    machine: Machine,
    flops: float,
) -> float:
    """Return the seconds of a step: computation, the pipeline's idle time, and the traffic between
    ranks and with the host that does not overlap with computation.

    Idle time of a pipeline of p stages and m micro-batches: (p-1)/m of the computation (Narayanan
    et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2),
    divided by the stages per rank if they are interleaved, and about a third of it with zero-bubble
    schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, table 1, ZB-H1).
    """
    axes = layout.axes
    # a single rank uses all cores
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
    # Within a tensor-parallel layer, between stages, and between the threads of `dp`, computation
    # waits for the traffic.
    overlaps = axes.replicas > 1 and axes.tensor == axes.pipeline == 1 and layout.num_processes > 1
    waiting = max(0.0, traffic - (_OVERLAPPED * compute if overlaps else 0.0))
    return compute + waiting + _host_time(cost, machine, compute)


def _shared_bytes(layout: ParallelLayout, profile: ModelProfile, machine: Machine) -> int:
    """Return the bytes of the frozen weights that a CPU rank does not use itself, because the ranks
    of the host map the same files."""
    if not machine.is_cpu or layout.strategy not in _MAPS_FROZEN_WEIGHTS:
        return 0
    return profile.mapped_bytes - profile.mapped_bytes // machine.count


def _weight_copies(shape: ModelShape, layout: ParallelLayout) -> int:
    """Return the bytes of the low-precision copies that autocast makes of the float32 weights of a
    model without known dimensions: backward needs them, so all exist when it starts."""
    axes = layout.axes
    if not shape.low_bytes or layout.has_low_weights:
        return 0
    matrices = sum(
        tensor.numel
        for tensor in shape.trained
        if len(tensor.shape) > 1 and tensor.element_bytes > shape.low_bytes
    )
    return shape.low_bytes * matrices // (axes.tensor * axes.pipeline)


def _check_divisible(layout: ParallelLayout, config: Config, profile: ModelProfile) -> None:
    """Check that the model's dimensions can be divided among tensor ranks and pipeline stages."""
    axes, dims, blocks = layout.axes, profile.dims, profile.shape.blocks
    chunked = config.parallel.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
    stages = axes.pipeline * (config.parallel.stages_per_rank if chunked else 1)
    if axes.pipeline > 1 and stages > len(blocks):
        raise ConfigError(
            f"{stages} pipeline stages are not possible: the model has"
            f" {counted(len(blocks), 'block')}"
        )
    if axes.pipeline > 1 and config.task == "recommend":
        raise ConfigError(
            "pipeline parallelism is not supported with `task: recommend`: a click model has no"
            " sequence of blocks"
        )
    if axes.tensor > 1 and not profile.shape.tensor_plan:
        raise ConfigError(
            "there is no tensor-parallel plan for this model: set `parallel.tensor_plan`"
        )
    if (
        axes.tensor > 1
        and dims is not None
        and (dims.heads % axes.tensor or dims.key_heads % axes.tensor)
    ):
        raise ConfigError(
            f"{dims.heads} attention heads and {dims.key_heads} key-value heads are not divisible"
            f" by {axes.tensor} tensor-parallel ranks"
        )


def _names(layout: ParallelLayout, stage: int | None) -> tuple[str, dict[str, str | int]]:
    """Return the mode's name, and the keys of ``parallel`` that select it."""
    strategy, text = layout.strategy, layout.axes.text()
    if stage is not None:
        return f"{strategy} stage {stage}", {"mode": strategy, "deepspeed_stage": stage}
    axes = {key: size for key, size in asdict(layout.axes).items() if size > 1}
    if strategy == "hybrid":
        return text, {"mode": strategy, **axes}
    if len(axes) > 1:
        return f"{strategy}, {text}", {"mode": strategy, **axes}
    return strategy, {"mode": strategy}

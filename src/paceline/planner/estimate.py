"""Estimate one layout on one machine: memory of the rank that uses most, traffic and time of a
step, from the costs that each strategy declares."""

from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from paceline.config.derive import accumulation_of
from paceline.config.schema import Config
from paceline.config.schema.grpo import check_completions_per_batch
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.texts import UserText
from paceline.models.context.choice import facts_of_run, item_bytes_of, method_of_run
from paceline.models.head.router_coefficient import check_router_loss
from paceline.models.kernels.attention_choice import joins_samples
from paceline.models.shape.activations import Activations, WeightPrecision, language_activations
from paceline.models.shape.adapter_memory import merged_experts
from paceline.models.shape.block_memory import FLOAT32_BYTES
from paceline.models.shape.record import ModelShape
from paceline.models.tensor_plan.style import HEAD, uses_sequence_parallel
from paceline.parallel.cost import ContextWork, Cost, Workload
from paceline.parallel.limits.images import check_vision_language
from paceline.parallel.registry import SIZE_KEYS, ParallelLayout, check_strategy, estimate_cost
from paceline.parallel.registry import layout as make_layout
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.mode_time import TimeEstimate, time_of_mode
from paceline.planner.model_profile import ModelProfile
from paceline.planner.rollout import RolloutEstimate, estimate_rollout, reference_bytes

#: Strategies in which every rank uses all frozen weights in place.
_MAPS_FROZEN_WEIGHTS = ("ddp", "zero1", "zero2", "local_sgd", "diloco")
#: Share of a device's memory that an estimate may fill. The rest is for the driver, fragmentation,
#: and what the activation model leaves out.
USABLE = 0.9


def workload(
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    layout: ParallelLayout,
    is_cpu: bool,
) -> Workload:
    """Return what a strategy's cost depends on besides the model's shape."""
    parts = layout.axes.context
    positions = batch.positions / parts
    work = Workload(
        config.train_args.gradient_accumulation_steps,
        positions,
        labels=positions * batch.label_share,
    )
    if parts > 1:
        method = method_of_run(config, layout.axes, "cpu" if is_cpu else "cuda")
        row = (max(1, round(batch.sample)),) * max(1, round(batch.positions / batch.sample))
        facts = facts_of_run(config, layout.axes)
        context = ContextWork(method.name, facts, item_bytes_of(config), (row,))
        work = replace(work, context=context)
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
        batch.fullest / parts,
        batch.fullest * batch.label_share / parts,
        mask_bytes=4 if is_cpu else 1,
        device_type="cpu" if is_cpu else "cuda",
        fused_attention=profile.fused_attention,
        row=batch.fullest if config.train_args.packing is not False else max(batch.lengths),
        joined=joins_samples(config, "cpu" if is_cpu else "cuda"),
        low_weights=layout.has_low_weights,
        tensor_ranks=layout.axes.tensor,
        splits_head=HEAD in profile.shape.tensor_plan.values(),
        sequence_parallel=uses_sequence_parallel(
            config.parallel.sequence_parallel,
            layout.axes.tensor,
            layout.axes.pipeline,
            profile.shape.splits_tokens,
        ),
        merged=merged_experts(profile.shape),
        expert_ranks=layout.axes.expert,
    )
    activations = activations.of_model(len(profile.shape.blocks))
    on_host = activations.on_host if activations.offloads else 0
    return replace(work, activations=activations, host_activation_bytes=on_host)


class MemoryReport(TypedDict):
    """Bytes on the rank that uses most, in the JSON of a plan; None if the mode is not possible.
    ``rollout``: the peak while completions are generated; None for tasks that generate none."""

    parameters: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None
    rollout: int | None
    total: int | None


class ModeReport(TypedDict):
    """A mode in the JSON of a plan."""

    mode: str
    fits: bool
    memory_bytes: MemoryReport
    traffic_bytes_per_step: int | None
    traffic_is_bound: bool
    step_time_s: float | None
    step_time_range_s: list[float] | None
    step_time_parts_s: dict[str, float] | None
    rollout_time_s: float | None
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
        time: times of a step; None if the device's rates are not known.
        rollout: what the completions of a step need; None for tasks that generate none.
        per_second: estimated samples per second over all ranks; if ``time`` is None, it only serves
            to rank modes.
    """

    name: str
    layout: ParallelLayout
    settings: dict[str, str | int]
    fits: bool
    reason: str
    cost: Cost | None = None
    shared_bytes: int = 0
    time: TimeEstimate | None = None
    per_second: float = 0.0
    global_batch_size: int = 0
    rollout: RolloutEstimate | None = None

    @property
    def step_time_s(self) -> float | None:
        return None if self.time is None else self.time.seconds

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
                rollout=None if cost is None else cost.rollout or None,
                total=None if cost is None else self.total,
            ),
            traffic_bytes_per_step=None if cost is None else cost.traffic_per_step,
            traffic_is_bound=cost is not None and cost.traffic_is_bound,
            step_time_s=self.step_time_s,
            step_time_range_s=None if self.time is None else self.time.range_s,
            step_time_parts_s=None if self.time is None else self.time.parts_s,
            rollout_time_s=None if self.time is None else self.time.rollout_s or None,
            reason=self.reason,
            strategy=self.layout.strategy,
            axes=asdict(self.layout.axes),
            settings=self.settings,
            traffic_bytes=None if cost is None else dict(cost.traffic),
            global_batch_size=self.global_batch_size or None,
            samples_per_second=self.per_second if self.time is not None else None,
            host_memory_bytes=None if cost is None else cost.host,
            host_traffic_bytes=None if cost is None else dict(cost.host_traffic),
        )


def free_layout(config: Config, num_devices: int, mode: str) -> ParallelLayout:
    """Return the layout of a mode, ignoring the sizes of axes that the config sets."""
    update = dict.fromkeys(SIZE_KEYS)
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
    name, settings = mode_names(layout, stage)
    update = dict.fromkeys(SIZE_KEYS) | settings
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})
    replicas, samples = layout.axes.replicas, config.train_args.global_batch_size
    if samples is not None:
        if replicas > samples:
            reason = UserText(
                "{replicas} replicas cannot share the global batch of {samples:sample}",
                code="replicas-cannot-share-batch",
                replicas=replicas,
                samples=samples,
            )
            return ModeEstimate(name, layout, settings, False, reason)
        config = with_accumulation(config, replicas)
    try:
        work = workload(config, profile, batch, layout, machine.is_cpu)
        check_strategy(layout.strategy, config, layout.axes, installed=False)
        check_vision_language(config, layout.axes)
        check_router_loss(config, layout.axes)
        _check_divisible(layout, config, profile)
        _check_groups(config, replicas)
        cost = estimate_cost(layout.strategy, profile.shape, layout.axes, work, config)
    except ConfigError as error:
        return ModeEstimate(name, layout, settings, False, error.text())
    if cost.on_accelerator is not None and not machine.is_cpu:
        cost = cost.on_accelerator
    cost = _with_host_activations(cost, work)
    reference = reference_bytes(config, cost)
    cost = replace(cost, parameters=cost.parameters + reference)
    time = time_of_mode(layout, config, profile, batch, cost, machine, stage)
    samples = samples or (
        replicas * work.micro_batches * config.train_args.per_device_train_batch_size
    )
    rollout = estimate_rollout(layout, config, profile, batch, cost, machine, time, samples)
    if rollout is not None:
        cost = replace(cost, rollout=rollout.memory_bytes)
        time = time.with_rollout(rollout.seconds)
    shared = _shared_bytes(layout, profile, machine)
    mode = ModeEstimate(
        name,
        layout,
        settings,
        True,
        "",
        cost,
        shared,
        time if machine.rates_known else None,
        samples / time.seconds,
        samples,
        rollout,
    )
    usable = USABLE * machine.memory_bytes
    if mode.total <= usable:
        share = f"{mode.total / machine.memory_bytes:.0%}"
        reason = UserText("{share} of the memory", code="mode-fits", share=share)
        return replace(mode, reason=reason)
    reason = UserText(
        "needs {needed}; {usable} of {memory} can be used",
        code="mode-needs-more-memory",
        needed=human_bytes(mode.total),
        usable=human_bytes(usable),
        memory=human_bytes(machine.memory_bytes),
    )
    return replace(mode, fits=False, reason=reason)


def with_accumulation(config: Config, replicas: int) -> Config:
    """Return the config with the accumulation that follows from its global batch, if it has one."""
    args = config.train_args
    if args.global_batch_size is None:
        return config
    count = accumulation_of(args.global_batch_size, args.per_device_train_batch_size, replicas)
    args = args.with_derived({"gradient_accumulation_steps": count})
    return config.model_copy(update={"train_args": args})


def _with_host_activations(cost: Cost, work: Workload) -> Cost:
    """Return the cost with the activations that are in host memory."""
    size = work.host_activation_bytes
    if not size:
        return cost
    traffic = {**cost.host_traffic, "activations": 2 * work.micro_batches * size}
    return replace(cost, host=cost.host + size, host_traffic=traffic)


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


def num_stages(layout: ParallelLayout, config: Config) -> int:
    """Return the number of pipeline stages."""
    chunked = config.parallel.pipeline_schedule in ("interleaved_1f1b", "zero_bubble")
    return layout.axes.pipeline * (config.parallel.stages_per_rank if chunked else 1)


def _check_divisible(layout: ParallelLayout, config: Config, profile: ModelProfile) -> None:
    """Check that the model can be divided among pipeline stages and the ranks of the other axes."""
    axes, dims, blocks = layout.axes, profile.dims, profile.shape.blocks
    stages = num_stages(layout, config)
    if axes.pipeline > 1 and stages > len(blocks):
        raise ConfigError(
            "{stages} pipeline stages are not possible: the model has {num_blocks:block}",
            code="pipeline-too-many-stages",
            stages=stages,
            num_blocks=len(blocks),
        )
    if axes.pipeline > 1 and merged_experts(profile.shape).saved:
        raise ConfigError(
            "pipeline parallelism is not supported with adapters on fused experts: peft changes"
            " the weights of such a model in each forward",
            code="pipeline-with-expert-adapters",
        )
    if axes.pipeline > 1 and config.task == "recommend":
        raise ConfigError(
            "pipeline parallelism is not supported with `task: recommend`: a click model has no"
            " sequence of blocks",
            code="pipeline-with-recommend",
        )
    if axes.context > 1 and (profile.layers or not profile.has_replaceable_attention):
        raise ConfigError(
            "context parallelism is not supported with this model: it has layers that pass a state"
            " from each token to the next, or attention that cannot be replaced",
            code="context-with-states",
        )
    if axes.expert > 1 and profile.num_experts == 0:
        raise ConfigError(
            "expert parallelism is not supported with this model: it has no experts, or"
            " transformers has no plan that divides them",
            code="plan-without-experts",
        )
    if axes.expert > 1 and profile.num_experts % axes.expert:
        raise ConfigError(
            "the {num_experts} experts of a layer are not divisible by {expert:rank}",
            code="experts-not-divisible",
            num_experts=profile.num_experts,
            expert=axes.expert,
        )
    if axes.tensor > 1 and not profile.shape.tensor_plan:
        raise ConfigError(
            "there is no tensor-parallel plan for this model: set `parallel.tensor_plan`",
            code="missing-tensor-plan",
        )
    if (
        axes.tensor > 1
        and dims is not None
        and (dims.heads % axes.tensor or dims.key_heads % axes.tensor)
    ):
        raise ConfigError(
            "{heads} attention heads and {key_heads} key-value heads are not divisible by {tensor}"
            " tensor-parallel ranks",
            code="heads-not-divisible",
            heads=dims.heads,
            key_heads=dims.key_heads,
            tensor=axes.tensor,
        )


def _check_groups(config: Config, replicas: int) -> None:
    """Check that the batch is whole groups of completions, if the task generates such."""
    if config.task in ROLLOUT_TASKS:
        args = config.train_args
        size = args.global_batch_size or (
            replicas * args.gradient_accumulation_steps * args.per_device_train_batch_size
        )
        check_completions_per_batch(size, config.grpo)


def mode_names(layout: ParallelLayout, stage: int | None) -> tuple[str, dict[str, str | int]]:
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

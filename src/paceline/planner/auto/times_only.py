"""Compare modes by their times alone, from config.json: for runs that certainly fit. No model is
built, and torch is not imported."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import read_config
from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.parallel.registry import ParallelLayout, check_strategy
from paceline.planner.auto.choose import eligible_layouts
from paceline.planner.estimate import mode_names, num_stages, with_accumulation
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.mode_time import time_of_layout
from paceline.planner.search.reasons import describe_change, slower_part
from paceline.planner.search.search import EQUAL
from paceline.planner.search.trials import with_settings


@dataclass(frozen=True)
class TimeComparison:
    """How ``ddp`` compares with other modes.

    Args:
        is_ddp_best: no other mode is faster by more than an estimate is accurate.
        why: end of the reason for the choice; None if nothing was compared.
        remarks: sentences about the runners-up.
    """

    is_ddp_best: bool = True
    why: UserText | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Mode:
    name: str
    layout: ParallelLayout
    samples: float
    seconds: float
    parts_s: dict[str, float]

    @property
    def per_sample_s(self) -> float:
        return self.seconds / self.samples


def compare_times(config: Config, machine: Machine) -> TimeComparison:
    """Compare ``ddp`` with all other modes on the devices of a machine. Nothing is compared if the
    rates of the devices or the widths of the model are not known."""
    if config.task not in CAUSAL_TASKS or not machine.rates_known:
        return TimeComparison()
    content = read_config(resolve_model(config.model))
    dims = None if content is None else dims_of(content)
    if dims is None:
        return TimeComparison()
    batch = micro_batch(config)
    modes = [
        mode
        for layout in eligible_layouts(config, machine.count)
        if (mode := _timed(layout, config, dims, batch, machine)) is not None
    ]
    ddp = next((mode for mode in modes if mode.layout.strategy == "ddp"), None)
    if ddp is None:
        return TimeComparison()
    is_best = all(mode.per_sample_s >= EQUAL * ddp.per_sample_s for mode in modes)
    # Whether the layers of a model can be divided among tensor ranks depends on its modules.
    others = [mode for mode in modes if mode is not ddp and mode.layout.axes.tensor == 1]
    others.sort(key=lambda mode: mode.per_sample_s)
    return TimeComparison(
        is_best,
        UserText(
            "; as fast as the best of {count} modes, by estimate",
            code="as-fast-as-best",
            count=len(modes),
        ),
        tuple(_next_text(mode, ddp) for mode in others[:2]),
    )


def _timed(
    layout: ParallelLayout,
    config: Config,
    dims: LanguageDims,
    batch: MicroBatchProfile,
    machine: Machine,
) -> _Mode | None:
    """Return the time of a layout; None if the config cannot be trained with it."""
    axes = layout.axes
    has_too_few_layers = axes.pipeline > 1 and num_stages(layout, config) > dims.layers
    if has_too_few_layers or dims.heads % axes.tensor or dims.key_heads % axes.tensor:
        return None
    name, settings = mode_names(layout, None)
    config = with_settings(config, {f"parallel.{key}": value for key, value in settings.items()})
    config = with_accumulation(config, axes.replicas)
    try:
        check_strategy(layout.strategy, config, axes, installed=False)
    except ConfigError:
        return None
    time = time_of_layout(layout, config, dims, batch, machine)
    args = config.train_args
    samples = axes.replicas * args.gradient_accumulation_steps * args.per_device_train_batch_size
    return _Mode(name, layout, samples, time.seconds, time.parts_s or {})


def _next_text(mode: _Mode, ddp: _Mode) -> UserText:
    change = mode.per_sample_s / ddp.per_sample_s - 1
    part = slower_part(mode.parts_s, ddp.parts_s, (mode.samples, ddp.samples))
    return UserText(
        "next: {name}: {difference}",
        code="next-mode",
        name=mode.name,
        difference=describe_change(change, part),
    )

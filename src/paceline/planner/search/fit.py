"""Choose the memory settings of a run whose layout is known: the defaults if they fit, otherwise
the fastest settings that fit. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.config.chosen import SIZE, changed_settings
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.texts import UserText
from paceline.parallel.registry import ParallelLayout
from paceline.planner.estimate import USABLE, ModeEstimate
from paceline.planner.search.advice import advise
from paceline.planner.search.search import EQUAL, Candidate
from paceline.planner.search.space import SettingSpace, open_space
from paceline.planner.search.trials import Settings, Trials, settings_text, with_settings

#: Share of an accelerator's memory above which a run is refused. Estimates are not more accurate
#: than this.
_REFUSED = 1.1


#: Why settings are preferred that :mod:`paceline.planner.search.memory_history` has.
FROM_HISTORY = "as in an earlier run of this kind, which had run out of memory"


@dataclass(frozen=True)
class KeptSettings:
    """Memory settings that are preferred if they fit, and why."""

    settings: Settings = field(default_factory=dict)
    reason: str = "as in the earlier attempt of this run"


@dataclass(frozen=True)
class MemoryFit:
    """The memory settings of a run.

    Args:
        candidate: the estimate with these settings, and those that differ from the config.
        default: the estimate with the settings of the config.
        kept: why these settings were preferred; None if they were not.
    """

    candidate: Candidate
    default: ModeEstimate
    kept: str | None = None

    @property
    def mode(self) -> ModeEstimate:
        return self.candidate.mode

    @property
    def settings(self) -> Settings:
        return self.candidate.settings

    def text(self, config: Config, memory_bytes: int) -> str | None:
        """Return which settings were chosen and why; None if they are the defaults.

        Args:
            config: the config before the choice.
            memory_bytes: memory of a device that the run may use.
        """
        if not self.settings:
            return None
        needed = f"{human_bytes(self.mode.total)} of {human_bytes(memory_bytes)} per rank"
        has_dropout = config.lora.enable and config.lora.dropout > 0
        same_batch = ". The global batch stays the same" if SIZE in self.settings else ""
        masks = "; dropout draws other masks" if same_batch and has_dropout else ""
        return UserText(
            "memory: {settings}, {reason} (predicted: {needed}){same_batch}{masks}",
            code="memory-chosen-other-masks"
            if masks
            else "memory-chosen-same-batch"
            if same_batch
            else "memory-chosen",
            settings=settings_text(self.settings),
            reason=self.kept if self.kept is not None else self._reason(),
            needed=needed,
            same_batch=same_batch,
            masks=masks,
        )

    def _reason(self) -> UserText:
        if self.default.fits:
            return UserText("the fastest that are predicted to fit", code="fastest-that-fit")
        default = human_bytes(self.default.total)
        if self.mode.fits:
            return UserText(
                "because the defaults need {default}", code="defaults-too-large", default=default
            )
        return UserText(
            "because the defaults need {default}, and nothing smaller is possible",
            code="nothing-smaller",
            default=default,
        )


def fit_memory(
    trials: Trials,
    layout: ParallelLayout,
    stage: int | None = None,
    *,
    kept: KeptSettings | None = None,
    host_memory_bytes: int | None = None,
) -> MemoryFit | None:
    """Return the memory settings for a layout: the defaults if they fit, otherwise the fastest that
    fit, otherwise those that need the least memory. None if the memory is not predicted.

    Args:
        stage: ZeRO stage of DeepSpeed.
        kept: settings that are preferred if they fit.
        host_memory_bytes: host memory that a rank may use; None if it is not known.
    """
    config = trials.config
    default = trials.estimate(layout, {}, stage)
    if default.cost is None or not trials.model(config).knows_activations:
        return None
    if kept is not None and kept.settings:
        mode = _possible(trials, layout, kept.settings, stage)
        if mode is not None and mode.fits:
            changed = changed_settings(config, kept.settings)
            return MemoryFit(Candidate(mode, changed), default, kept.reason)
    if default.fits and not config.train_args.auto_find_batch_size:
        return MemoryFit(Candidate(default, {}), default)
    space = open_space(trials)
    tried = [
        Candidate(mode, settings)
        for settings in _settings(space, layout.axes.replicas)
        if (mode := _possible(trials, layout, settings, stage)) is not None
        and _fits_host(mode, host_memory_bytes)
    ] or [Candidate(default, {})]
    fitting = [each for each in tried if each.mode.fits]
    if not fitting:
        return MemoryFit(min(tried, key=lambda each: (each.mode.total, each.complexity)), default)
    return MemoryFit(_fastest(fitting), default)


def _fastest(fitting: list[Candidate]) -> Candidate:
    """Return the fastest candidate; of those that are as fast, the one with the least in host
    memory, since pinning host memory takes time at the start, then the simplest."""
    limit = min(each.seconds_per_sample for each in fitting) / EQUAL
    equal = [each for each in fitting if each.seconds_per_sample <= limit]
    return min(equal, key=lambda each: (_host_bytes(each.mode), each.complexity))


def _settings(space: SettingSpace, replicas: int) -> Iterator[Settings]:
    """Yield the combinations of the open settings. Micro-batches are not larger than the config's,
    unless it leaves their size to the choice."""
    args = space.config.train_args
    for saving in space.savings():
        for batch in space.batches(replicas):
            size = batch.get(SIZE, args.per_device_train_batch_size)
            if args.auto_find_batch_size or int(size) <= args.per_device_train_batch_size:
                yield {**saving.settings, **batch}


def _possible(
    trials: Trials, layout: ParallelLayout, settings: Settings, stage: int | None
) -> ModeEstimate | None:
    try:
        mode = trials.estimate(layout, settings, stage)
    except ConfigError:
        return None
    return None if mode.cost is None else mode


def _host_bytes(mode: ModeEstimate) -> int:
    return 0 if mode.cost is None else mode.cost.host


def _fits_host(mode: ModeEstimate, memory_bytes: int | None) -> bool:
    return memory_bytes is None or _host_bytes(mode) <= USABLE * memory_bytes


def check_fits(fit: MemoryFit, trials: Trials, memory_bytes: int, name: str) -> str | None:
    """Return a warning if a run may not fit into the memory of an accelerator.

    Args:
        memory_bytes: all memory of the device, including what other processes hold.
        name: name of the device.

    Raises:
        ConfigError: the run does not fit.
    """
    mode, machine = fit.mode, trials.machine
    if mode.fits:
        return None
    settings = settings_text(fit.settings)
    what = f"{mode.name}{f' with {settings}' if settings else ''}"
    needed = f"needs {human_bytes(mode.total)} per rank by estimate"
    has = f"{name} has {human_bytes(memory_bytes)}"
    if machine.memory_bytes < memory_bytes:
        has += f"; other processes hold {human_bytes(memory_bytes - machine.memory_bytes)}"
    if mode.total <= _REFUSED * memory_bytes:
        return UserText(
            "memory: {subject} {needed}, and {has}: the run may run out of memory",
            code="may-not-fit",
            subject=what,
            needed=needed,
            total=human_bytes(mode.total),
            has=has,
            device=name,
            memory=human_bytes(memory_bytes),
        )
    config = with_settings(trials.config, fit.settings)
    change = advise(config, trials.model(config), trials.batch(config), machine, mode).smallest
    raise ConfigError(
        "the run does not fit: {subject} {needed}, and {has}",
        code="run-does-not-fit",
        fix="use more devices, a smaller model or a shorter `max_length`, or train adapters"
        " (`lora.enable=true`); `paceline plan` shows what each mode needs"
        if change is None
        else f"set `{change.text}` ({human_bytes(change.mode.total)} per rank;"
        f" {'; '.join(change.costs)})",
        subject=what,
        needed=needed,
        has=has,
    )

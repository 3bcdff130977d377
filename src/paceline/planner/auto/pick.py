"""What ``parallel.mode: auto`` chooses before a run. Imports no torch, unless modes have to be
compared with all details."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.processes import available_memory
from paceline.core.texts import UserText
from paceline.parallel.registry import ParallelLayout, layout
from paceline.planner.auto.choose import choose
from paceline.planner.auto.times_only import TimeComparison, compare_times
from paceline.planner.machine import profile as machine_profile
from paceline.planner.machine.local import device_memory, local_machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import describe
from paceline.planner.search.trials import Settings
from paceline.planner.upper_bound import fits_roughly


@dataclass(frozen=True)
class AutoChoice:
    """What ``parallel.mode: auto`` chooses before a run: the layout, the settings of the config
    that differ (including the mode), the reason, and remarks about other set-ups."""

    layout: ParallelLayout
    settings: Settings
    why: str
    remarks: tuple[str, ...] = ()


def pick(
    config: Config,
    num_devices: int,
    device_memory_bytes: int | None = None,
    *,
    device_type: str | None = None,
) -> AutoChoice:
    """Return what ``parallel.mode: auto`` chooses. Called before any rank exists.

    The lengths of the samples are read from the token cache. For a language model whose data is
    not in the cache, ``max_length`` is assumed.

    Args:
        device_memory_bytes: memory of one device; None: the memory of this machine's devices.
        device_type: ``cpu``, ``cuda``…; None: by the config and this machine.

    Raises:
        ConfigError: no mode fits; names the one that needs the least memory and what to change.
    """
    device_type = device_type or _device_type(config)
    early = pick_without_lengths(config, num_devices, device_memory_bytes, device_type=device_type)
    if early is not None:
        return early
    is_cpu = device_type == "cpu"
    memory = _memory_bytes(device_memory_bytes, num_devices, is_cpu)
    batch = micro_batch(config)
    if batch.has_tokens and batch.known:
        roomy = _roomy(config, num_devices, device_type, memory, batch)
        if roomy is not None:
            return roomy
    try:
        profile = describe(config)
    except ConfigError:
        if config.task in (*CAUSAL_TASKS, "reward", "classify"):
            raise
        text = UserText(
            "the model's memory is not known before it is built", code="model-memory-not-known"
        )
        return _plain(config, num_devices, text)
    machine = local_machine(num_devices, is_cpu, config.train_args.compute_format, memory)
    choice = choose(config, profile, batch, machine, installed=True)
    if choice.chosen is not None:
        return AutoChoice(choice.chosen.layout, choice.settings, choice.why, choice.remarks)
    smallest = choice.smallest
    if smallest is not None and smallest.mode.cost is not None:
        # Without token counts the activations are an upper bound, so only the state is certain.
        needed = smallest.mode.total if batch.known else smallest.mode.cost.state
        if needed <= machine.memory_bytes:
            why = UserText(
                "{name}, which needs the least memory but may not fit: it {reason}",
                code="smallest-may-not-fit",
                name=smallest.name,
                reason=smallest.mode.reason,
            )
            return AutoChoice(smallest.mode.layout, smallest.all_settings, why, choice.remarks)
    raise ConfigError(
        "`parallel.mode: auto`: {why}",
        code="does-not-fit",
        fix="make one of these changes, or set a mode (`parallel.mode=zero3`) to try it anyway;"
        " `paceline plan` shows all modes",
        why=choice.why,
    )


def pick_without_lengths(
    config: Config,
    num_devices: int,
    device_memory_bytes: int | None = None,
    *,
    device_type: str,
) -> AutoChoice | None:
    """Return what ``parallel.mode: auto`` chooses if the choice does not depend on the lengths of
    the samples; otherwise None. The arguments are as in :func:`pick`.

    Most runs need far less memory than there is: if an upper bound from config.json or from the
    headers of the weights shows that ``ddp`` fits, if the config leaves nothing else open that
    could be faster, and if no other mode takes less time by an estimate from the model's widths,
    no model is built and torch is not imported.
    """
    memory = _memory_bytes(device_memory_bytes, num_devices, device_type == "cpu")
    if not memory:
        text = UserText("the memory of these devices is not known", code="memory-not-known")
        return _plain(config, num_devices, text)
    return _roomy(config, num_devices, device_type, memory, None)


def _memory_bytes(size_bytes: int | None, num_devices: int, is_cpu: bool) -> int:
    return size_bytes or (available_memory() // num_devices if is_cpu else device_memory())


def _roomy(
    config: Config,
    num_devices: int,
    device_type: str,
    memory_bytes: int,
    batch: MicroBatchProfile | None,
) -> AutoChoice | None:
    """Return ``ddp`` if the upper bound for ``batch`` shows that it fits, and if nothing else could
    be better; otherwise None."""
    rough = fits_roughly(config, memory_bytes, batch) if _is_closed(config) else None
    if rough is None:
        return None
    compared = _compare(config, num_devices, device_type, memory_bytes)
    if not compared.is_ddp_best:
        return None
    why = UserText(
        "needs at most {needed} of {memory} per rank{comparison}",
        code="needs-at-most" if compared.why is None else "needs-at-most-and-fastest",
        needed=human_bytes(rough),
        memory=human_bytes(memory_bytes),
        comparison=compared.why or "",
    )
    return _plain(config, num_devices, why, compared.remarks)


def _is_closed(config: Config) -> bool:
    """Return whether no other set-up than ``ddp`` as configured needs to be compared: it is the
    simplest, and if all of the global batch of a replica fits into a micro-batch, the fastest."""
    args, parallel = config.train_args, config.parallel
    is_size_open = args.auto_find_batch_size or (
        args.global_batch_size is not None
        and "per_device_train_batch_size" not in args.model_fields_set
    )
    return parallel.optimize_for == "time" and not parallel.allow_lossy and not is_size_open


def _compare(
    config: Config, num_devices: int, device_type: str, memory_bytes: int
) -> TimeComparison:
    """Compare the times of modes on this machine, as far as its rates are known. The rates of a CPU
    are known if `paceline doctor` measured them."""
    if num_devices == 1:
        return TimeComparison()
    is_cpu = device_type == "cpu"
    if is_cpu and machine_profile.read("cpu") is None:
        text = UserText(
            "other modes were not compared, because `paceline doctor` has not measured this CPU",
            code="modes-not-compared",
        )
        return TimeComparison(remarks=(text,))
    args = config.train_args
    machine = local_machine(
        num_devices, is_cpu, args.compute_format, memory_bytes, can_measure=False
    )
    return compare_times(config, machine)


def _plain(
    config: Config, num_devices: int, reason: str, remarks: tuple[str, ...] = ()
) -> AutoChoice:
    """Return the simplest mode. `single` is not recorded as a setting, so that the run can resume
    from its own config on more devices."""
    name = "ddp" if num_devices > 1 else "single"
    chosen = layout(config.parallel, num_devices, name)
    settings: Settings = {"parallel.mode": name} if num_devices > 1 else {}
    why = UserText("{name}: {reason}", code="mode-chosen", name=name, reason=reason)
    return AutoChoice(chosen, settings, why, remarks)


def _device_type(config: Config) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    from paceline.distributed.devices import accelerators

    return accelerators()[0] or "cpu"

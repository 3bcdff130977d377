"""Settings that depend on the chosen mode and do not change the result: the size of gradient
buckets, and the number of loader processes. Imports no torch."""

from paceline.config.schema import Config
from paceline.data.sources.kinds import classifies_images
from paceline.distributed.devices import cpu_cores
from paceline.models.kinds import reads_images
from paceline.parallel.registry import get_spec
from paceline.planner.estimate import ModeEstimate
from paceline.planner.hardware import Machine
from paceline.planner.search.trials import Setting

_MIB = 1 << 20
_BUCKETS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 200)
#: A change must save at least this share of a step.
_MINIMUM_GAIN = 0.01
_MAX_WORKERS = 4


def bucket_size(
    config: Config, mode: ModeEstimate, machine: Machine
) -> tuple[dict[str, Setting], str]:
    """Return the setting of a better size of gradient buckets, and why; empty without a measured
    link, or if the default is as good."""
    link, cost = machine.link, mode.cost
    if (
        link is None
        or cost is None
        or mode.time is None
        or "bucket_cap_mb" in config.parallel.model_fields_set
        or not get_spec(mode.layout.strategy).capabilities.reduces_in_buckets
        or mode.layout.axes.data == 1
    ):
        return {}, ""
    seconds = mode.time.seconds
    micro_batches = max(1.0, mode.global_batch_size / max(1, mode.layout.axes.replicas))
    micro_batches /= max(1, config.train_args.per_device_train_batch_size)
    backward_s = 2 / 3 * seconds / max(1.0, micro_batches)

    def exposed(size_mib: float) -> float:
        size = round(size_mib * _MIB)
        full, rest = divmod(cost.gradients, size)
        return link.exposed_s([*([size] * full), *([rest] if rest else [])], backward_s)

    best = min(_BUCKETS_MIB, key=exposed)
    saved = exposed(config.parallel.bucket_cap_mb) - exposed(best)
    if saved < _MINIMUM_GAIN * seconds:
        return {}, ""
    return {"parallel.bucket_cap_mb": float(best)}, (
        f"buckets of {best} MiB save {1000 * saved:.2g} ms per step on the measured link"
    )


def loader_processes(
    config: Config, num_ranks: int, machine: Machine
) -> tuple[dict[str, Setting], str]:
    """Return the setting of loader processes for images on accelerators, and why; else empty.

    Tokens are read from a mapped file, which takes less time than another process costs. A rank
    that streams its data starts processes by itself.
    """
    if machine.is_cpu or "dataloader_num_workers" in config.train_args.model_fields_set:
        return {}, ""
    has_images = reads_images(config) or (config.task == "classify" and classifies_images(config))
    count = min(_MAX_WORKERS, cpu_cores() // num_ranks - 1)
    if not has_images or count < 1:
        return {}, ""
    return {"train_args.dataloader_num_workers": count}, (
        f"loader processes decode images ({count} per rank)"
    )

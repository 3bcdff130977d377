"""The ways there are to spread a run over a number of devices. No torch here."""

from collections.abc import Iterator

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import OTHER_TRAINING, STRATEGIES, ParallelLayout, layout, mode_of

#: Modes of one axis, in the order of preference where two are equally fast: the plainest first.
PLAIN = sorted(
    (name for name in STRATEGIES if name not in ("single", "hybrid", *OTHER_TRAINING)),
    key=lambda name: STRATEGIES[name].single_process,
)
#: Tensor parallelism talks in every layer; beyond a host's devices it does not pay.
_MOST_TENSOR = 8


def candidates(config: Config, num_devices: int) -> list[ParallelLayout]:
    """Every layout for ``num_devices``: ``single`` first, the modes of one axis, then the hybrids
    by sizes of their axes.

    Sizes and mode that the config gives do not narrow the list; what they name is in it. Whether a
    model can be cut this way is the strategies' to say.
    """
    free = config.parallel.model_copy(
        update={"data": None, "shard": None, "tensor": None, "pipeline": None}
    )
    found = [ParallelLayout("single", ParallelDims(), 1)]
    if num_devices > 1:
        found += [layout(free, num_devices, name) for name in PLAIN]
        found += [ParallelLayout("hybrid", axes, num_devices) for axes in _hybrids(num_devices)]
    elif config.parallel.offload != "none":
        found += [layout(free, 1, name) for name in ("zero2", "zero3")]
    own = configured(config, num_devices)
    if own is not None and own not in found:
        found.append(own)
    return found


def configured(config: Config, num_devices: int) -> ParallelLayout | None:
    """The layout that the config itself names; None under ``auto``, and where it cannot be:
    :func:`misfit` tells why."""
    if mode_of(config.parallel) == "auto" or misfit(config, num_devices) is not None:
        return None
    return layout(config.parallel, num_devices)


def misfit(config: Config, num_devices: int) -> ConfigError | None:
    """Why the config's own mode and sizes do not go together, or not with that many devices."""
    try:
        if mode_of(config.parallel) != "auto":
            layout(config.parallel, num_devices)
    except ConfigError as error:
        return error
    return None


def _hybrids(num_devices: int) -> Iterator[ParallelDims]:
    """Products of at least two axes. FSDP within hosts and replicas across (HSDP) is one of
    them."""
    for data in _divisors(num_devices):
        for shard in _divisors(num_devices // data):
            for tensor in _divisors(num_devices // data // shard):
                axes = ParallelDims(data, shard, tensor, num_devices // data // shard // tensor)
                if (
                    tensor <= _MOST_TENSOR
                    and sum(size > 1 for size in (data, shard, tensor, axes.pipeline)) > 1
                ):
                    yield axes


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]

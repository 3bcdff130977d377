"""Choose how the ranks of a context group exchange keys and values. Imports no torch."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.context.rows import divide_row
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.context.geometry import (
    AttentionGeometry,
    extends_positions,
    has_dropout,
    needs_own_attention,
    read_geometry,
)
from paceline.models.context.methods import GATHER, METHODS, RING, ULYSSES
from paceline.models.context.traffic import busiest_rank_bytes
from paceline.models.json_config import JsonObject
from paceline.models.kernels.attention_choice import MAX_HEAD_SIZE


@dataclass(frozen=True)
class ContextMethod:
    """The method of a run.

    Args:
        name: ``ring``, ``ulysses`` or ``gather``.
        why: the reason, for users.
    """

    name: str
    why: str


@dataclass(frozen=True)
class _Rates:
    """Assumed rates of a device, which only serve to compare the methods.

    Args:
        flops_s: operations per second in attention.
        memory_bytes_s: bytes per second that a kernel reads and writes.
        link_bytes_s, network_bytes_s: bytes per second to ranks of the same host, and of others.
    """

    flops_s: float
    memory_bytes_s: float
    link_bytes_s: float
    network_bytes_s: float


_CPU = _Rates(5e10, 1e10, 2e9, 1e9)
_ACCELERATOR = _Rates(3e14, 2e12, 1.5e11, 2.5e10)


def choose_method(config: Config, dims: ParallelDims, device_type: str) -> ContextMethod:
    """Choose the method for a model, from its config.json.

    Raises:
        ConfigError: the model does not allow the method of the config, or no method.
    """
    content, size = config_numbers(config.model), dims.context
    _check_positions(config, content, size)
    geometry = read_geometry(content, dims.tensor)
    reasons = _reasons_against(config, content, geometry, size, device_type)
    requested = config.parallel.context_method
    if requested in reasons:
        allowed = [name for name in METHODS if name not in reasons]
        raise ConfigError(
            "`parallel.context_method: {requested}` is not supported here: {reason}",
            code="context-method",
            allowed=", ".join(["auto", *allowed]),
            fix="set `parallel.context_method: auto`",
            requested=requested,
            reason=reasons[requested],
        )
    if requested != "auto":
        why = UserText("the config sets it", code="context-method-set")
        return ContextMethod(requested, why)
    if RING in reasons and ULYSSES in reasons:
        return ContextMethod(GATHER, reasons[RING])
    if geometry is None:
        why = UserText("the model's sizes are not known", code="context-sizes-unknown")
        return ContextMethod(RING if RING not in reasons else GATHER, why)
    times = {
        name: _layer_time(config, geometry, name, dims, device_type)
        for name in METHODS
        if name not in reasons
    }
    fastest = min(times, key=lambda name: times[name])
    text = ", ".join(f"{name} {1e3 * seconds:.2g} ms" for name, seconds in times.items())
    why = UserText(
        "fastest by estimate for a row of {tokens:,} tokens ({times} per layer)",
        code="context-method-fastest",
        tokens=config.train_args.max_length,
        times=text,
    )
    return ContextMethod(fastest, why)


def _reasons_against(
    config: Config,
    content: JsonObject,
    geometry: AttentionGeometry | None,
    size: int,
    device_type: str,
) -> dict[str, str]:
    """Return why methods cannot be used, by method."""
    reasons: dict[str, str] = {}
    feature = needs_own_attention(content)
    if feature is None and has_dropout(content):
        feature = "dropout of attention weights"
    if feature is not None:
        text = UserText(
            "kernels for blocks of a row do not support the model's {feature}",
            code="context-own-attention",
            feature=feature,
        )
        return {RING: text, ULYSSES: text}
    is_low = element_bytes_of(config) == 2
    is_small = geometry is None or geometry.key_size <= MAX_HEAD_SIZE
    if device_type != "cpu" and not (device_type == "cuda" and is_low and is_small):
        reasons[RING] = UserText(
            "kernels for blocks of a row need a CUDA device, 16-bit numbers and heads of at most"
            " {size} numbers",
            code="context-no-block-kernel",
            size=MAX_HEAD_SIZE,
        )
    if geometry is not None and geometry.heads % size:
        reasons[ULYSSES] = UserText(
            "{size} ranks cannot share {heads} query heads evenly",
            code="context-heads",
            size=size,
            heads=geometry.heads,
        )
    return reasons


def _check_positions(config: Config, content: JsonObject, size: int) -> None:
    if extends_positions(content, config.train_args.max_length):
        raise ConfigError(
            "`parallel.context: {size}` is not supported with `model: {model}` and"
            " `train_args.max_length: {max_length}`: its rotary embedding depends on the longest"
            " position of a row, and each rank has a part of the row",
            code="context-positions",
            fix="set `train_args.max_length` to at most the positions before the extension"
            " (`original_max_position_embeddings` in config.json), or leave `parallel.context` out",
            size=size,
            model=config.model,
            max_length=config.train_args.max_length,
        )


def _layer_time(
    config: Config, geometry: AttentionGeometry, method: str, dims: ParallelDims, device_type: str
) -> float:
    """Return the estimated seconds of one layer's attention and its exchanges for a row of one
    sample, in forward and backward."""
    rates = _CPU if device_type == "cpu" else _ACCELERATOR
    size, hosts = dims.context, config.parallel.hosts[1]
    spans_hosts = hosts > 1 and dims.context * dims.tensor > dims.size // hosts
    link = rates.network_bytes_s if spans_hosts else rates.link_bytes_s
    lengths = (config.train_args.max_length,)
    element_bytes = element_bytes_of(config)
    sent = busiest_rank_bytes(
        geometry, method, [lengths], size, element_bytes=element_bytes, forwards=1.0
    )
    sent_s = sum(sent.values()) / geometry.num_layers / link
    division = divide_row(lengths, size)
    pairs = sum(
        max(division.num_pairs(rank, window) for rank in range(size)) for window in geometry.windows
    )
    # A product of queries and keys, one of scores and values; 2.5 times as many in backward.
    per_pair = 7 * geometry.heads * (geometry.key_size + geometry.value_size)
    computed_s = per_pair * pairs / geometry.num_layers / rates.flops_s
    if method != RING:
        return sent_s + computed_s
    # Each step reads and writes the merged output in float32.
    merged = 3 * 4 * (size - 1) * (lengths[0] / size) * geometry.heads * geometry.value_size
    return max(sent_s, computed_s) + merged / rates.memory_bytes_s


def element_bytes_of(config: Config) -> int:
    """Return the bytes of an element of keys and values."""
    args = config.train_args
    return 2 if args.mixed_dtype is not None or args.weight_dtype == "bfloat16" else 4

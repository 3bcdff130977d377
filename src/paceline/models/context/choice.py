"""Choose the method of context parallelism. Imports no torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.config.schema import Config
from paceline.core import formatting
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.context.rows import divide_row
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.context.facts import AttentionFacts, attention_facts
from paceline.models.context.methods import GATHER, METHODS, RING, ULYSSES
from paceline.models.context.traffic import busiest_rank_bytes
from paceline.models.kernels.attention_choice import MAX_HEAD_SIZE

#: Floating-point operations of attention per (query, key) pair and element of a head: a product
#: and a sum in forward, and five such products to two in backward.
_OPERATIONS = 2 * (1 + 2.5)
#: Data types in which the kernel for blocks computes on GPUs.
_LOW = ("bfloat16", "float16")
#: Number of tokens of a row per rank, if the caller does not know it.
_TOKENS_PER_RANK = 8192


@dataclass(frozen=True)
class ContextMethod:
    """A method of context parallelism, and why it was chosen."""

    name: str
    why: UserText


@dataclass(frozen=True)
class MethodCost:
    """What a method costs one rank in one layer, forward and backward, for a row of one sample.

    Args:
        sent_bytes: bytes that the rank sends.
        num_messages: exchanges that follow on each other.
        pairs: (query, key) pairs that the rank computes, times its number of heads.
        overlaps: whether the rank computes while it sends.
    """

    sent_bytes: int
    num_messages: int
    pairs: int
    overlaps: bool = False


@dataclass(frozen=True)
class _Rates:
    """Orders of magnitude of a device and of its link, to compare methods."""

    operations_s: float
    link_bytes_s: float
    message_s: float


#: Device type → rates within a host and between hosts.
_RATES = {
    "cuda": (_Rates(3e14, 1.5e11, 2e-5), _Rates(3e14, 2e10, 4e-5)),
    "cpu": (_Rates(5e10, 2e9, 1e-4), _Rates(5e10, 1e9, 2e-4)),
}


def method_of_run(
    config: Config, dims: ParallelDims, device_type: str, *, has_varlen: bool = True
) -> ContextMethod:
    """Choose the method of a run from the config.json of its model.

    Args:
        has_varlen: whether the build of torch on the ranks has a kernel for blocks on GPUs.

    Raises:
        ConfigError: the model or the device does not allow the method of the config, or none.
    """
    facts = facts_of_run(config, dims)
    tokens = config.train_args.max_length
    _check_model(config, facts)
    hosts = config.parallel.hosts[1]
    spans_hosts = hosts > 1 and dims.context * dims.tensor > dims.size // hosts
    return choose_method(
        config.parallel.context_method,
        dims.context,
        facts,
        device_type,
        compute_dtype(config),
        hosts if spans_hosts else 1,
        num_tokens=tokens * config.train_args.per_device_train_batch_size,
        has_varlen=has_varlen,
    )


def facts_of_run(config: Config, dims: ParallelDims) -> AttentionFacts:
    """Return the facts of the model's attention layers on a tensor-parallel rank."""
    return attention_facts(config_numbers(config.model), dims.tensor)


def item_bytes_of(config: Config) -> int:
    """Return the bytes of an element of queries, keys and values."""
    return 2 if compute_dtype(config) in _LOW else 4


def compute_dtype(config: Config) -> str:
    """Return the data type of queries, keys and values."""
    args = config.train_args
    return args.mixed_dtype or args.weight_dtype


def choose_method(
    requested: str,
    size: int,
    facts: AttentionFacts,
    device_type: str,
    dtype: str,
    hosts: int,
    *,
    num_tokens: int | None = None,
    has_varlen: bool = True,
) -> ContextMethod:
    """Choose the method of context parallelism.

    Args:
        requested: "auto", or the name of a method.
        size: number of ranks of a context group.
        dtype: data type of matrix products.
        hosts: number of hosts on which the ranks of a context group are.
        num_tokens: number of tokens of a row.
        has_varlen: whether this build of torch has a fused kernel for blocks on GPUs.

    Raises:
        ConfigError: the model or the device does not allow the method, or none.
    """
    reasons = {
        method: _obstacle(method, size, facts, device_type, dtype, has_varlen) for method in METHODS
    }
    allowed = [method for method in METHODS if reasons[method] is None]
    if requested != "auto":
        reason = reasons[requested]
        if reason is not None:
            raise ConfigError(
                "`parallel.context_method: {method}` is not supported here: {reason}",
                code="context-method-not-possible",
                allowed=", ".join(["auto", *allowed]),
                fix="set `parallel.context_method: auto`",
                method=requested,
                reason=reason,
            )
        return ContextMethod(requested, UserText("it was requested", code="context-requested"))
    if len(allowed) == 1:
        missing = [reason for reason in reasons.values() if reason is not None]
        why = UserText("it is the only possible method: {reason}", code="context-only-method",
                       reason=missing[0])  # fmt: skip
        return ContextMethod(allowed[0], why)
    tokens = num_tokens or _TOKENS_PER_RANK * size
    costs = {
        method: list(_costs(method, size, facts, device_type, dtype, tokens)) for method in allowed
    }
    rates = _RATES.get(device_type, _RATES["cpu"])[hosts > 1]
    times = {
        method: sum(_seconds(cost, facts, rates) * count for cost, count in each)
        for method, each in costs.items()
    }
    method = min(allowed, key=times.__getitem__)
    sent = sum(cost.sent_bytes * count for cost, count in costs[method])
    why = UserText(
        "it has the lowest estimated time of {methods}: a rank sends {sent} per row of"
        " {tokens:token}",
        code="context-fastest",
        methods=", ".join(allowed),
        sent=formatting.size(sent),
        tokens=tokens,
    )
    return ContextMethod(method, why)


def method_cost(
    method: str,
    size: int,
    facts: AttentionFacts,
    window: int | None,
    num_tokens: int,
    item_bytes: int,
    skips_pairs: bool = True,
) -> MethodCost:
    """Return the cost of a method for the rank that sends most in a row of one sample.

    Args:
        window: number of tokens that a token attends to in the layer; None: all before it.
        item_bytes: size of an element of the queries, keys and values.
        skips_pairs: whether the kernel of ``gather`` skips the pairs that the mask hides.
    """
    division = divide_row((num_tokens,), size)
    sent = busiest_rank_bytes(
        replace(facts, windows=(window,)), method, [(num_tokens,)], size, item_bytes
    )
    sent_bytes = sum(sent.values())
    pairs = facts.query_heads * max(division.num_pairs(rank, window) for rank in range(size))
    if method == RING:
        return MethodCost(sent_bytes, 3 * (size - 1), pairs, overlaps=True)
    if method == ULYSSES:
        share = facts.query_heads // size or 1
        total = sum(division.num_pairs(rank, window) for rank in range(size))
        return MethodCost(sent_bytes, 4, total * share)
    if not skips_pairs:
        pairs = facts.query_heads * max(
            sum(_rectangle(piece.start, piece.stop, window) for piece in pieces)
            for pieces in division.pieces
        )
    return MethodCost(sent_bytes, 2, pairs)


def _rectangle(start: int, stop: int, window: int | None) -> int:
    first = 0 if window is None else max(0, start - window + 1)
    return (stop - start) * (stop - first)


def _costs(
    method: str, size: int, facts: AttentionFacts, device_type: str, dtype: str, num_tokens: int
) -> Iterator[tuple[MethodCost, int]]:
    """Yield the cost of each kind of layer and the number of such layers."""
    item_bytes = 2 if dtype in _LOW else 4
    is_fused = device_type == "cuda" and dtype in _LOW
    for window, count in Counter(facts.windows).items():
        yield (
            method_cost(method, size, facts, window, num_tokens, item_bytes, skips_pairs=is_fused),
            count,
        )


def _seconds(cost: MethodCost, facts: AttentionFacts, rates: _Rates) -> float:
    elements = facts.head_size + facts.value_size
    computing = cost.pairs * elements * _OPERATIONS / rates.operations_s
    sending = cost.sent_bytes / rates.link_bytes_s + cost.num_messages * rates.message_s
    return max(computing, sending) if cost.overlaps else computing + sending


def _check_model(config: Config, facts: AttentionFacts) -> None:
    """Raise ConfigError if no method computes the model's attention."""
    reason = None
    if facts.has_chunks:
        reason = UserText(
            "its layers attend within chunks of a row", code="context-attention-chunks"
        )
    elif facts.fixed_positions is not None and config.train_args.max_length > facts.fixed_positions:
        reason = UserText(
            "its position embeddings depend on the longest position in a row if samples are longer"
            " than {tokens:token}, and a rank has only a part of the row",
            code="context-rope",
            tokens=facts.fixed_positions,
        )
    if reason is not None:
        raise ConfigError(
            "`parallel.context` is not supported with `model: {model}`: {reason}",
            code="context-not-possible",
            fix="leave `parallel.context` out, or set a smaller `train_args.max_length`",
            model=config.model,
            reason=reason,
        )


def _obstacle(
    method: str,
    size: int,
    facts: AttentionFacts,
    device_type: str,
    dtype: str,
    has_varlen: bool,
) -> UserText | None:
    """Return why a method is not possible, or None if it is."""
    if method == GATHER:
        return None
    if facts.caps_scores:
        return UserText("the model soft-caps its attention scores", code="context-softcap")
    if facts.has_sinks:
        return UserText("the model's attention has sinks", code="context-sinks")
    if facts.has_dropout:
        return UserText("attention weights have dropout", code="context-dropout")
    if method == RING:
        return _kernel_obstacle(facts, device_type, dtype, has_varlen)
    if facts.divisible_heads % size:
        return UserText(
            "{heads:query head} of a rank cannot be divided among {size:rank}",
            code="context-heads",
            heads=facts.divisible_heads,
            size=size,
        )
    return None


def _kernel_obstacle(
    facts: AttentionFacts, device_type: str, dtype: str, has_varlen: bool
) -> UserText | None:
    """Return why the kernel for blocks cannot be used, or None if it can."""
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return UserText(
            "there is no kernel for blocks on `{device_type}`",
            code="context-ring-device",
            device_type=device_type,
        )
    if dtype not in _LOW:
        return UserText(
            "its kernel computes in bfloat16 and float16, and this run in {dtype}",
            code="context-ring-dtype",
            dtype=dtype,
        )
    if not has_varlen:
        return UserText("this build of torch has no flash attention", code="context-ring-varlen")
    if facts.max_head_size > MAX_HEAD_SIZE:
        return UserText(
            "the head size of its kernel is at most {limit}, and the model's is {head_size}",
            code="context-ring-head-size",
            limit=MAX_HEAD_SIZE,
            head_size=facts.max_head_size,
        )
    return None

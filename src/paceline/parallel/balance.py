"""Compute shares of micro-batches in proportion to the speed of each rank (``parallel.balance``),
and check where this is supported.

The global batch is divided into the same micro-batches as with equal shares; only the rank that
computes a micro-batch changes. The loss is divided by the global count, so the gradient is the same
up to the order of summation. Imports no torch.
"""

from collections.abc import Sequence

from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import weighted_shares
from paceline.core.texts import UserText
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.gradient_compression import uses_local_moments

#: Minimum number of micro-batches per step; fewer cannot express a useful ratio of speeds.
MIN_MICRO_BATCHES = 4


def text_of(config: Config) -> str:
    """Return the setting as written in a config, such as ``speed`` or ``[3, 1]``."""
    balance = config.parallel.balance
    return (
        balance
        if isinstance(balance, str)
        else "[" + ", ".join(f"{weight:g}" for weight in balance) + "]"
    )


def check_balance(
    config: Config, mode: str, unequal_shares: bool, reason: str, axes: ParallelDims
) -> None:
    """Raise ConfigError if ``parallel.balance`` is not supported with the strategy ``mode`` or with
    the rest of the config.

    Args:
        unequal_shares: whether the strategy supports unequal shares.
        reason: reason why it does not, for the message.
    """
    balance = config.parallel.balance
    if balance == "equal" or axes.size == 1:
        return
    setting = f"`parallel.balance: {text_of(config)}`"
    whole_replicas = axes.shard == axes.tensor == axes.pipeline == 1
    if not (unequal_shares and whole_replicas):
        raise ConfigError(
            "{setting} is not supported with `parallel.mode: {mode}`: {reason}",
            code="balance-with-mode",
            allowed="`parallel.mode: ddp` and `zero1`",
            fix="set `parallel.mode: ddp` or `zero1`, or `parallel.balance: equal`",
            setting=setting,
            mode=mode,
            reason=reason,
        )
    if config.compression.chain[:1] == ("signsgd",):
        raise ConfigError(
            "{setting} is not supported with `compression.method: signsgd`: every rank has one"
            " vote, whatever its share",
            code="balance-with-signsgd",
            allowed="bf16, fp16, int8, powersgd, and topk or randomk with"
            " `compression.local_moments: false`",
            fix="set another `compression.method`, or `parallel.balance: equal`",
            setting=setting,
        )
    if uses_local_moments(config):
        raise ConfigError(
            "{setting} is not supported with `compression.local_moments`: the direction of every"
            " rank counts equally, whatever its share",
            code="balance-with-local-moments",
            allowed="`compression.local_moments: false`",
            fix="set `compression.local_moments: false`, or `parallel.balance: equal`",
            setting=setting,
        )
    if isinstance(balance, list):
        _check_number_of_weights(config, setting, len(balance), axes.size)


def _check_number_of_weights(
    config: Config, setting: str, num_weights: int, num_ranks: int
) -> None:
    min_hosts, max_hosts = config.parallel.hosts
    if min_hosts != max_hosts:
        raise ConfigError(
            "{setting} is not supported with `parallel.nnodes: {nnodes}`: its weights are fixed,"
            " and the number of hosts may change",
            code="balance-with-changing-hosts",
            allowed="`parallel.balance: speed`, or a fixed `parallel.nnodes`",
            fix="set `parallel.balance: speed`",
            setting=setting,
            nnodes=config.parallel.nnodes,
        )
    from paceline.distributed.environment import outer_launcher

    # Under an outer launcher the number of hosts is known once the ranks are connected, see
    # `rank_weights`.
    if num_weights not in (num_ranks, max_hosts) and outer_launcher() is None:
        raise _wrong_number(setting, num_weights, num_ranks, max_hosts)


def _wrong_number(setting: str, num_weights: int, num_ranks: int, num_hosts: int) -> ConfigError:
    allowed = f"one weight per rank ({num_ranks})"
    if num_hosts > 1:
        allowed += f" or one per host ({num_hosts})"
    return ConfigError(
        "{setting} has {num_weights:weight}, and the run has {num_ranks:rank} on {num_hosts:host}",
        code="wrong-number-of-weights",
        allowed=allowed,
        fix="give one weight per rank, or set `parallel.balance: speed`",
        setting=setting,
        num_weights=num_weights,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
    )


def rank_weights(config: Config, local_ranks: Sequence[int]) -> list[float]:
    """Return one weight per rank. A weight of a host applies to each of its ranks.

    Args:
        local_ranks: local rank of every rank. Ranks are numbered host by host.

    Raises:
        ConfigError: if there is not one weight per rank or one per host.
    """
    weights = config.parallel.balance
    assert isinstance(weights, list)
    if len(weights) == len(local_ranks):
        return list(weights)
    num_hosts = sum(local_rank == 0 for local_rank in local_ranks)
    if len(weights) != num_hosts:
        raise _wrong_number(
            f"`parallel.balance: {text_of(config)}`", len(weights), len(local_ranks), num_hosts
        )
    by_rank, host = [], -1
    for local_rank in local_ranks:
        host += local_rank == 0
        by_rank.append(weights[host])
    return by_rank


def is_divisible(replicas: int, micro_batches: int) -> bool:
    """Return whether a step has enough micro-batches for unequal shares."""
    return replicas > 1 and micro_batches > replicas and micro_batches >= MIN_MICRO_BATCHES


def equal_notice(config: Config, derived: ResolvedValues) -> tuple[str, str] | None:
    """Return (level, text) if the run cannot have unequal shares although ``parallel.balance`` asks
    for them."""
    replicas, accumulation = derived.replicas, derived.gradient_accumulation_steps
    micro_batches = replicas * accumulation
    if config.parallel.balance == "equal" or is_divisible(replicas, micro_batches):
        return None
    setting = f"`parallel.balance: {text_of(config)}`"
    if replicas == 1:
        return "info", UserText(
            "{setting} has no effect with one rank",
            code="setting-without-effect-on-one-rank",
            setting=setting,
        )
    needed = max(2, -(-MIN_MICRO_BATCHES // replicas))
    return (
        "warning",
        (
            UserText(
                "{setting} has no effect: it needs at least {min_micro_batches} micro-batches per"
                " step on {replicas:rank}, and this run has {micro_batches}. All ranks get equal"
                " shares. To change that, set `train_args.gradient_accumulation_steps: {needed}`"
                " or more, with a smaller `per_device_train_batch_size` to keep the global batch",
                code="balance-without-effect",
                setting=setting,
                min_micro_batches=max(MIN_MICRO_BATCHES, 2 * replicas),
                replicas=replicas,
                micro_batches=micro_batches,
                needed=needed,
            )
        ),
    )


def shares_by_speed(micro_batches: int, seconds: Sequence[float]) -> list[int]:
    """Return the number of micro-batches for each rank, in proportion to its speed.

    Args:
        seconds: time per micro-batch of each rank.
    """
    return weighted_shares(micro_batches, [1 / duration for duration in seconds])


def step_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of forward and backward in a step: the time of the slowest rank."""
    return max(count * duration for count, duration in zip(shares, seconds, strict=True))

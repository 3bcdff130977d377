"""The share of time that a run makes progress despite failures, and the interval between
checkpoints that maximizes it. Imports no torch.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equations 20
(expected time) and 37 (optimum). Failures are independent and occur at a constant rate.
"""

import math
from dataclasses import dataclass

#: Assumed time in which the ranks agree on a checkpoint and collect its tensors.
_LEAST_PAUSE_S = 1.0


def young_interval(pause_s: float, mtbf_s: float) -> float:
    """Return the seconds of computation between checkpoints, in first order: √(2 δ M)."""
    return math.sqrt(2 * pause_s * mtbf_s)


def daly_interval(pause_s: float, mtbf_s: float) -> float:
    """Return the seconds of computation between checkpoints, in higher order."""
    if pause_s >= 2 * mtbf_s:
        return mtbf_s
    share = pause_s / (2 * mtbf_s)
    series = 1 + math.sqrt(share) / 3 + share / 9
    return young_interval(pause_s, mtbf_s) * series - pause_s


def expected_goodput(interval_s: float, pause_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the share of time in which steps are computed that no failure undoes: the inverse of
    M e^(R/M) (e^((τ+δ)/M) - 1) / τ."""
    exponent = (interval_s + pause_s) / mtbf_s
    if exponent + recovery_s / mtbf_s > 700:
        return 0.0
    return interval_s / (mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(exponent))


@dataclass(frozen=True)
class FailureModel:
    """What failures and checkpoints cost.

    Args:
        mtbf_hours: mean time between failures of one device, with its share of the host and the
            network.
        storage_bytes_s: rate at which a host writes and reads checkpoints.
        restart_s: from a failure to running ranks again, without reading the checkpoint.
    """

    mtbf_hours: float
    storage_bytes_s: float = 2e9
    restart_s: float = 120.0


@dataclass(frozen=True)
class Goodput:
    """The expected progress of a run with failures.

    Args:
        mtbf_s: mean time between failures of any device of the run.
        pause_s: time for which a checkpoint stops the steps.
        write_s: time to write a checkpoint, in the background if the run does so.
        recovery_s: time to recover after a failure, with reading the checkpoint.
        interval_s: time between checkpoints: Daly's interval, but no less than a write takes.
        young_s: the interval in first order, by Young.
        goodput: share of the time in which steps are computed that no failure undoes.
    """

    mtbf_s: float
    checkpoint_bytes: int
    pause_s: float
    write_s: float
    recovery_s: float
    interval_s: float
    young_s: float
    goodput: float


def goodput_of(
    failures: FailureModel,
    checkpoint_bytes: int,
    num_ranks: int,
    ranks_per_host: int,
    host_link_bytes_s: float,
    *,
    is_async: bool,
) -> Goodput:
    """Return the goodput with the best interval between checkpoints.

    Args:
        checkpoint_bytes: size of the parts of all ranks; each rank writes an equal part.
        host_link_bytes_s: bandwidth from a device to its host's memory; infinite on a CPU.
        is_async: whether a checkpoint is written from a copy in host memory while steps continue.
            The steps since the copy are lost, too, if a failure occurs before it is written.
    """
    part = checkpoint_bytes / num_ranks
    copy_s = part / host_link_bytes_s
    write_s = part * ranks_per_host / failures.storage_bytes_s
    pause_s = _LEAST_PAUSE_S + copy_s + (0.0 if is_async else write_s)
    recovery_s = failures.restart_s + write_s
    mtbf_s = failures.mtbf_hours * 3600 / num_ranks
    interval_s = max(daly_interval(pause_s, mtbf_s), write_s if is_async else 0.0)
    late_s = write_s if is_async else 0.0
    return Goodput(
        mtbf_s,
        checkpoint_bytes,
        pause_s,
        write_s,
        recovery_s,
        interval_s,
        young_interval(pause_s, mtbf_s),
        expected_goodput(interval_s, pause_s, recovery_s + late_s, mtbf_s),
    )

"""The size of gradient buckets, which does not change the result. Imports no torch."""

from paceline.parallel.registry import ParallelLayout, get_spec
from paceline.planner.estimate import ModeEstimate
from paceline.planner.search.trials import Setting, Settings, Trials

BUCKET_SIZE = "parallel.bucket_cap_mb"
_SIZES_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 200)
#: A change must save at least this share of a step.
_MINIMUM_GAIN = 0.01


def bucket_size(
    trials: Trials, layout: ParallelLayout, settings: Settings, mode: ModeEstimate
) -> dict[str, Setting]:
    """Return the setting of the size of gradient buckets with the fastest step; empty without a
    measured link or known rates, or if the default is as good.

    Args:
        mode: the estimate of the layout with these settings.
    """
    if (
        trials.machine.link is None
        or mode.cost is None
        or mode.time is None
        or BUCKET_SIZE.rpartition(".")[2] in trials.config.parallel.model_fields_set
        or not get_spec(layout.strategy).capabilities.reduces_in_buckets
        or layout.axes.data == 1
    ):
        return {}

    def speed(size_mib: float) -> float:
        return trials.estimate(layout, {**settings, BUCKET_SIZE: size_mib}).per_second

    best = max(map(float, _SIZES_MIB), key=speed)
    is_better = speed(best) * (1 - _MINIMUM_GAIN) > mode.per_second
    return {BUCKET_SIZE: best} if is_better else {}

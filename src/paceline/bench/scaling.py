"""`paceline bench scaling`: measure how the time per step changes with the number of ranks."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from paceline.bench.intervals import geometric_estimate
from paceline.bench.scaling_fit import Point, Scaling, StepModel, fit_model
from paceline.bench.short_runs import (
    RunLength,
    ShortRun,
    Train,
    mean_parts,
    run_short,
    warn_if_busy,
)
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, log_notices
from paceline.core.processes import temporary_environment
from paceline.distributed.devices import accelerators, cpu_cores
from paceline.distributed.environment import outer_launcher
from paceline.parallel.registry import layout

logger = logging.getLogger(__name__)

#: The global batch of strong scaling has at most this many micro-batches on the first ranks.
_MAX_SHARE = 64


class ScalingRow(TypedDict):
    """A number of ranks with one kind of scaling.

    ``efficiency`` and ``speedup`` are relative to the smallest number of ranks; ideal are 1 and
    ``ideal_speedup``. ``parts``: the figures of :class:`~paceline.bench.short_runs.StepParts`.
    Intervals are [low, high] at 95 % confidence, None with one repeat, and for
    the efficiency of the smallest number of ranks. Figures
    are None if the ranks could not be started, because each needs its own accelerator.
    """

    scaling: Scaling
    ranks: int
    oversubscribed: bool
    global_batch_size: int | None
    micro_batches_per_rank: int
    step_time_s: float | None
    step_time_interval_s: list[float] | None
    work_per_second: float | None
    speedup: float | None
    ideal_speedup: float
    efficiency: float | None
    efficiency_interval: list[float] | None
    parts: dict[str, float] | None
    peak_memory_bytes: int | None


class PredictedRow(TypedDict):
    """A prediction of the fitted model."""

    scaling: Scaling
    ranks: int
    step_time_s: float
    speedup: float
    efficiency: float
    efficiency_interval: list[float] | None


class FittedModel(TypedDict):
    """The fitted model: seconds of each term, and the predictions."""

    terms: dict[str, float]
    residual: float | None
    predictions: list[PredictedRow]


class ScalingReport(TypedDict):
    """The result of the command. ``unit``: of ``work_per_second``, which is per second and over all
    ranks. ``fit`` is None if there are fewer than two numbers of ranks that are not
    oversubscribed."""

    model: str
    strategy: str
    device: str
    units: int
    threads_per_rank: int | None
    unit: str
    steps: int
    repeats: int
    rows: list[ScalingRow]
    fit: FittedModel | None


@dataclass(frozen=True)
class ScalingOptions:
    """What to measure. ``predict``: numbers of ranks to predict; empty for the next three powers of
    two."""

    ranks: tuple[int, ...]
    length: RunLength
    kinds: tuple[Scaling, ...] = ("weak", "strong")
    repeats: int = 3
    predict: tuple[int, ...] = ()


@dataclass(frozen=True)
class Units:
    """The cores (``cpu``) or accelerators of this machine."""

    device: str
    count: int

    @property
    def limits_ranks(self) -> bool:
        """Whether there cannot be more ranks than units."""
        return self.device != "cpu"


@dataclass(frozen=True)
class ScalingCase:
    """Ranks that compute a number of micro-batches each."""

    ranks: int
    micro_batches: int


#: The runs of each case, in the order of the repeats.
Runs = dict[ScalingCase, list[ShortRun]]


def measure_scaling(loaded: Loaded, options: ScalingOptions, train: Train) -> ScalingReport:
    """Measure every number of ranks ``options.repeats`` times, in turn.

    Raises:
        ConfigError: the config or the options are invalid; nothing was started.
        RunError: a run failed.
    """
    config = loaded.config
    _check(config)
    log_notices(logger, loaded.notices)
    units = find_units(config)
    cases = cases_of(config, options)
    started = [case for case in cases if not (units.limits_ranks and case.ranks > units.count)]
    for case in started:
        _check_layout(_for_case(loaded, case, units).config, case.ranks)
    threads = threads_per_rank(options.ranks, units)
    warn_if_busy()
    batch_size = config.train_args.per_device_train_batch_size
    runs: Runs = {case: [] for case in started}
    with temporary_environment({} if threads is None else {"OMP_NUM_THREADS": str(threads)}):
        for repeat in range(options.repeats):
            # Alternating the order cancels a drift of the machine's speed.
            for case in started if repeat % 2 == 0 else reversed(started):
                logger.info(
                    f"repeat {repeat + 1} of {options.repeats}: {counted(case.ranks, 'rank')},"
                    f" {case.micro_batches} × {batch_size} samples"
                    " each",
                    extra=CONSOLE_ONLY,
                )
                run = run_short(_for_case(loaded, case, units), train, options.length)
                runs[case].append(run)
    return make_report(config, options, units, threads, runs)


def _check(config: Config) -> None:
    if outer_launcher() is not None or config.parallel.hosts != (1, 1):
        raise ConfigError(
            "`paceline bench scaling` starts its own ranks on one host",
            code="starts-its-own-ranks",
            fix="run it without torchrun, and without `parallel.nnodes`",
        )
    if config.parallel.mode == "single":
        raise ConfigError(
            "`parallel.mode: single` trains on one device, so there is nothing to compare",
            code="nothing-to-compare",
            fix="set `parallel.mode: ddp`",
        )


def _check_layout(config: Config, num_ranks: int) -> None:
    """Raise ConfigError if the config's parallel sizes do not allow this number of ranks."""
    try:
        layout(config.parallel, num_ranks)
    except ConfigError as error:
        raise ConfigError(
            "`--ranks`: {reason}",
            code="ranks-not-divisible",
            allowed=error.allowed,
            fix="leave these sizes out of the config, or change `--ranks`",
            reason=error.what,
        ) from error


def find_units(config: Config) -> Units:
    """Return the cores or accelerators on which the config trains."""
    if config.parallel.device != "cpu":
        kind, names = accelerators()
        if kind is not None and names:
            return Units(kind, len(names))
    return Units("cpu", cpu_cores())


def threads_per_rank(ranks: Sequence[int], units: Units) -> int | None:
    """Return the threads that each rank gets, equal for all numbers of ranks: else one rank would
    compute with all cores, and more ranks could not be faster. None if the user has set them, or on
    accelerators."""
    if units.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    fitting = [count for count in ranks if count <= units.count]
    return max(1, units.count // max(fitting, default=units.count))


def cases_of(config: Config, options: ScalingOptions) -> list[ScalingCase]:
    """Return the cases without duplicates: a case may belong to both kinds of scaling."""
    return list(
        dict.fromkeys(
            case_of(config, options, kind, ranks)
            for kind in options.kinds
            for ranks in options.ranks
        )
    )


def case_of(config: Config, options: ScalingOptions, kind: Scaling, ranks: int) -> ScalingCase:
    """Return the case: with weak scaling, each rank computes as many micro-batches as the config
    says; with strong scaling, all ranks share a global batch that every number of ranks divides."""
    accumulation = config.train_args.gradient_accumulation_steps
    if kind == "weak":
        return ScalingCase(ranks, accumulation)
    shared = math.lcm(*options.ranks)
    if shared // min(options.ranks) > _MAX_SHARE:
        raise ConfigError(
            "`--ranks` has no small common multiple, which the global batch of strong scaling"
            " needs",
            code="no-common-multiple",
            fix="use powers of two, such as `--ranks 1,2,4`, or `--scaling weak`",
        )
    return ScalingCase(ranks, accumulation * shared // ranks)


def _for_case(loaded: Loaded, case: ScalingCase, units: Units) -> Loaded:
    config = loaded.config
    update: dict[str, str | int] = {"num_gpus": case.ranks, "device": units.device}
    if config.parallel.mode == "auto":
        update["mode"] = "ddp"  # `auto` could choose another strategy for each number of ranks
    args = config.train_args.model_copy(
        update={
            "gradient_accumulation_steps": case.micro_batches,
            "auto_find_batch_size": False,
            "global_batch_size": None,
        }
    )
    parallel = config.parallel.model_copy(update=update)
    return Loaded(
        config.model_copy(update={"parallel": parallel, "train_args": args}), path=loaded.path
    )


def make_report(
    config: Config, options: ScalingOptions, units: Units, threads: int | None, runs: Runs
) -> ScalingReport:
    """Return the figures of all runs, and the fitted model."""
    any_run = next(iter(runs.values()))[0]
    rows = [
        _row(config, options, units, runs, kind, ranks)
        for kind in options.kinds
        for ranks in options.ranks
    ]
    return {
        "model": config.model,
        "strategy": _strategy(runs),
        "device": any_run.device,
        "units": units.count,
        "threads_per_rank": threads,
        "unit": any_run.unit,
        "steps": options.length.steps,
        "repeats": options.repeats,
        "rows": rows,
        "fit": _fit(config, options, units, runs),
    }


def _strategy(runs: Runs) -> str:
    """Return the strategy of the largest number of ranks: one rank may train as `single`."""
    return runs[max(runs, key=lambda case: case.ranks)][0].strategy


def _row(
    config: Config, options: ScalingOptions, units: Units, runs: Runs, kind: Scaling, ranks: int
) -> ScalingRow:
    case, first_ranks = case_of(config, options, kind, ranks), min(options.ranks)
    measured = runs.get(case, [])
    row: ScalingRow = {
        "scaling": kind,
        "ranks": ranks,
        "oversubscribed": ranks > units.count,
        "global_batch_size": None,
        "micro_batches_per_rank": case.micro_batches,
        "step_time_s": None,
        "step_time_interval_s": None,
        "work_per_second": None,
        "speedup": None,
        "ideal_speedup": ranks / first_ranks,
        "efficiency": None,
        "efficiency_interval": None,
        "parts": None,
        "peak_memory_bytes": None,
    }
    if not measured:
        return row
    first = runs[case_of(config, options, kind, first_ranks)]
    step_s = geometric_estimate([run.mean_step_s for run in measured])
    speedups = [_rate(run) / _rate(base) for run, base in zip(measured, first, strict=True)]
    efficiency = geometric_estimate([speedup * first_ranks / ranks for speedup in speedups])
    parts = [run.parts for run in measured if run.parts is not None]
    peaks = [run.peak_memory_bytes for run in measured if run.peak_memory_bytes is not None]
    row["global_batch_size"] = measured[0].global_batch_size
    row["step_time_s"], row["step_time_interval_s"] = step_s.mean, step_s.limits
    row["work_per_second"] = geometric_estimate([_rate(run) for run in measured]).mean
    row["speedup"] = geometric_estimate(speedups).mean
    row["efficiency"] = efficiency.mean
    row["efficiency_interval"] = efficiency.limits if ranks > first_ranks else None
    row["parts"] = asdict(mean_parts(parts)) if parts else None
    row["peak_memory_bytes"] = max(peaks, default=None)
    return row


def _rate(run: ShortRun) -> float:
    """Return the tokens or samples per second. With weak scaling the ranks read other samples for
    each number of ranks, so their number of tokens differs."""
    return run.work / run.mean_step_s


def _fit(config: Config, options: ScalingOptions, units: Units, runs: Runs) -> FittedModel | None:
    fitting = {case: measured for case, measured in runs.items() if case.ranks <= units.count}
    per_batch = _work_per_micro_batch(fitting)
    repeats = [
        [_point(case, measured[repeat], per_batch) for case, measured in fitting.items()]
        for repeat in range(options.repeats)
    ]
    model = fit_model([point for points in repeats for point in points]) if fitting else None
    if model is None:
        return None
    # A fit of each repeat alone shows how far the predictions vary.
    each = [fitted for fitted in map(fit_model, repeats) if fitted is not None]
    ranks = options.predict or default_predictions(max(case.ranks for case in fitting))
    return {
        "terms": model.seconds,
        "residual": model.residual,
        "predictions": [
            _predict(config, options, model, each, kind, count)
            for kind in options.kinds
            for count in ranks
        ],
    }


def default_predictions(largest: int) -> tuple[int, ...]:
    """Return the next three powers of two."""
    power = 1 << largest.bit_length()
    return power, 2 * power, 4 * power


def _work_per_micro_batch(runs: Runs) -> float:
    """Return the mean tokens or samples of a micro-batch over all runs."""
    works = [
        run.work / (case.ranks * case.micro_batches)
        for case, measured in runs.items()
        for run in measured
    ]
    return sum(works) / len(works) if works else 1.0


def _point(case: ScalingCase, run: ShortRun, work_per_micro_batch: float) -> Point:
    """Return the time of a step with mean micro-batches."""
    work = case.ranks * case.micro_batches * work_per_micro_batch
    return Point(case.ranks, case.micro_batches, work / _rate(run))


def _predict(
    config: Config,
    options: ScalingOptions,
    model: StepModel,
    each: Sequence[StepModel],
    kind: Scaling,
    ranks: int,
) -> PredictedRow:
    first_ranks = min(options.ranks)
    first = case_of(config, options, kind, first_ranks).micro_batches
    share = first if kind == "weak" else first * first_ranks / ranks
    efficiency = model.efficiency(kind, ranks, first_ranks, first)
    each_efficiency = [other.efficiency(kind, ranks, first_ranks, first) for other in each]
    return {
        "scaling": kind,
        "ranks": ranks,
        "step_time_s": model.time_s(ranks, share),
        "speedup": efficiency * ranks / first_ranks,
        "efficiency": efficiency,
        "efficiency_interval": geometric_estimate(each_efficiency).limits,
    }

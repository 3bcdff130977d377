"""`paceline bench tuning`: measure what each of several changes to a config gains on this machine,
and recommend those that certainly do."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from paceline.bench.claims import CLAIMS, TechniqueClaim
from paceline.bench.intervals import Estimate
from paceline.bench.short_runs import RunLength, ShortRun, Train, run_short, warn_if_busy
from paceline.bench.tuning_changes import TuningChange, candidate_changes, with_values
from paceline.bench.tuning_decision import Criterion, Goal, TuningTrial, Verdict, combined_change
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, RunError, StoppedError
from paceline.core.log import CONSOLE_ONLY, log_notices
from paceline.distributed.devices import cpu_cores
from paceline.distributed.environment import outer_launcher

logger = logging.getLogger(__name__)

#: How often unclear changes are measured for as many rounds again. Whether they still are is only
#: looked at after all rounds: each look is a chance to stop at an extreme value.
_MORE_TIMES = 3


class TuningChangeReport(TypedDict):
    """A measured change. Ratios are relative to the unchanged config, with intervals [low, high] at
    95 % confidence; figures that were not measured are None.

    ``changes_result`` says how the trained weights differ; None if they are the same up to the
    order of float32 sums. ``loss_difference`` is the largest relative difference of the training
    loss of a step. ``steps_to_pay_off``: after so much training, faster steps have made up for a
    longer first step.
    """

    name: str
    technique: str
    values: dict[str, YamlValue]
    changes_result: str | None
    verdict: Verdict
    reason: str | None
    rounds: int
    speedup: float | None
    speedup_interval: list[float] | None
    memory_ratio: float | None
    memory_interval: list[float] | None
    traffic_ratio: float | None
    loss_difference: float | None
    first_step_extra_s: float | None
    steps_to_pay_off: int | None


class ClaimReport(TypedDict):
    """A claim with its source, and what was measured: the saved share of traffic or memory, or the
    ratio of throughputs; None if it was not measured."""

    technique: str
    claim: str
    source: str
    url: str
    source_says: str
    figure: str
    measured: float | None
    measured_interval: list[float] | None


class Baseline(TypedDict):
    """The unchanged config: means over its runs."""

    step_time_s: float
    work_per_second: float
    unit: str
    peak_memory_bytes: int | None
    traffic_bytes: int | None
    planned_steps: int | None


class TuningReport(TypedDict):
    """The result of the command. ``recommendation`` is None if no change is recommended;
    ``tuned_config`` is the path of the file that was written."""

    model: str
    strategy: str
    device: str
    world_size: int
    precision: str
    goal: Goal
    margin: float
    steps: int
    baseline: Baseline
    changes: list[TuningChangeReport]
    recommendation: TuningChangeReport | None
    claims: list[ClaimReport]
    tuned_config: str | None


@dataclass(frozen=True)
class TuningOptions:
    """What to measure.

    Attributes:
        length: number of steps of a run.
        min_measured_s: runs get more steps if the steps of the unchanged config would take less
            than this many seconds, because the times of shorter runs vary more.
        rounds: runs of each change. Changes that are unclear after them get as many again, up to
            three times.
        margin: smallest gain that counts, as a share.
        keep_result: leave out changes that change the trained weights.
        techniques: the techniques to measure; empty for all.
    """

    length: RunLength
    min_measured_s: float = 0.0
    rounds: int = 5
    margin: float = 0.05
    goal: Goal = "time"
    keep_result: bool = False
    techniques: tuple[str, ...] = ()


def measure_tuning(loaded: Loaded, options: TuningOptions, train: Train) -> TuningReport:
    """Measure the changes and return the report, without writing a file.

    Raises:
        ConfigError: the config cannot run, or no change is possible.
        RunError: a run of the unchanged config failed.
    """
    _check(loaded.config, options)
    log_notices(logger, loaded.notices)
    warn_if_busy()
    logger.info("unchanged config", extra=CONSOLE_ONLY)
    first = run_short(loaded, train, options.length)
    steps = math.ceil(options.min_measured_s / first.mean_step_s)
    if steps > options.length.steps:
        options = replace(options, length=replace(options.length, steps=steps))
    config = loaded.config
    trials = [
        TuningTrial(change)
        for change in _changes(config, options, first.precision, first.world_size, first.device)
    ]
    criterion = Criterion(options.goal, options.margin, planned_steps(config, first))
    rounds = _Rounds(loaded, options, train)

    def run_until_clear(trials: Sequence[TuningTrial]) -> None:
        rounds.run(trials, options.rounds)
        for _ in range(_MORE_TIMES):
            unclear = [trial for trial in trials if criterion.verdict(trial) == "unclear"]
            rounds.run(unclear, options.rounds)

    run_until_clear(trials)
    selected = criterion.select(trials)
    combined = None
    if len(selected) > 1:
        combined = TuningTrial(combined_change(selected))
        run_until_clear([combined])
    chosen = criterion.choose(selected, combined)
    unchanged = [run for trial in trials for run, _ in trial.pairs] or [first]
    return make_report(config, criterion, options.length.steps, unchanged, trials, chosen)


def _check(config: Config, options: TuningOptions) -> None:
    if outer_launcher() is not None or config.parallel.hosts != (1, 1):
        raise ConfigError(
            "`paceline bench tuning` starts its own ranks on one host",
            code="starts-its-own-ranks",
            fix="run it without torchrun, and without `parallel.nnodes`",
        )
    # The precision and the number of ranks are not known before the first run. With several ranks
    # there are more changes.
    _changes(config, options, "32", num_ranks=2, device_type="cpu")


def _changes(
    config: Config, options: TuningOptions, precision: str, num_ranks: int, device_type: str
) -> list[TuningChange]:
    changes = [
        change
        for change in candidate_changes(config, precision, num_ranks, cpu_cores(), device_type)
        if not (options.keep_result and change.changes_result)
        and (not options.techniques or change.technique in options.techniques)
    ]
    if not changes:
        raise ConfigError(
            "no change of these techniques is possible for this config",
            code="nothing-to-tune",
            fix="leave out `--techniques` or `--keep-result`",
        )
    return changes


def planned_steps(config: Config, run: ShortRun) -> int | None:
    """Return the number of steps of the config's run; None if it is unknown."""
    if config.train_args.max_steps is not None:
        return config.train_args.max_steps
    if run.steps_per_epoch is None:
        return None
    return math.ceil(config.train_args.num_train_epochs * run.steps_per_epoch)


@dataclass
class _Rounds:
    """Runs changes in rounds. Every run of a change is next to a run of the unchanged config, and
    the order alternates, so that load and clock speed that vary over minutes affect both."""

    loaded: Loaded
    options: TuningOptions
    train: Train

    def run(self, trials: Sequence[TuningTrial], count: int) -> None:
        """Run each change ``count`` times, unless it fails."""
        for number in range(count):
            remaining = [trial for trial in trials if trial.error is None]
            if not remaining:
                return
            logger.info(
                f"round {number + 1} of {count}: "
                + ", ".join(trial.change.name for trial in remaining),
                extra=CONSOLE_ONLY,
            )
            ordered = remaining if number % 2 == 0 else remaining[::-1]
            for index in range(0, len(ordered), 2):
                self._run_pair(ordered[index : index + 2])

    def _run_pair(self, trials: Sequence[TuningTrial]) -> None:
        """Run one or two changes with a run of the unchanged config between them."""
        before = self._run_changed(trials[0])
        unchanged = run_short(self.loaded, self.train, self.options.length)
        if before is not None:
            trials[0].pairs.append((unchanged, before))
        for trial in trials[1:]:
            after = self._run_changed(trial)
            if after is not None:
                trial.pairs.append((unchanged, after))

    def _run_changed(self, trial: TuningTrial) -> ShortRun | None:
        try:
            config = with_values(self.loaded.config, trial.change.values)
            return run_short(replace(self.loaded, config=config), self.train, self.options.length)
        except StoppedError:
            raise
        except (ConfigError, RunError) as error:
            kind: Literal["not supported", "failed"] = "failed"
            if isinstance(error, ConfigError):
                kind = "not supported"
            trial.error = (kind, error.what)
            trial.pairs.clear()
            logger.warning("%s: %s: %s", trial.change.name, kind, error.what)
            return None


def make_report(
    config: Config,
    criterion: Criterion,
    steps: int,
    unchanged: Sequence[ShortRun],
    trials: Sequence[TuningTrial],
    chosen: TuningTrial | None,
) -> TuningReport:
    """Return the figures of all changes and the recommendation.

    Args:
        steps: number of measured steps of a run.
        unchanged: the runs of the unchanged config.
        chosen: the change to recommend, or None.
    """
    first, count = unchanged[0], len(unchanged)
    peaks = [run.peak_memory_bytes for run in unchanged if run.peak_memory_bytes is not None]
    return {
        "model": config.model,
        "strategy": first.strategy,
        "device": first.device,
        "world_size": first.world_size,
        "precision": first.precision,
        "goal": criterion.goal,
        "margin": criterion.margin,
        "steps": steps,
        "baseline": {
            "step_time_s": sum(run.mean_step_s for run in unchanged) / count,
            "work_per_second": sum(run.work / run.mean_step_s for run in unchanged) / count,
            "unit": first.unit,
            "peak_memory_bytes": round(sum(peaks) / len(peaks)) if peaks else None,
            "traffic_bytes": first.traffic_bytes,
            "planned_steps": criterion.planned_steps,
        },
        "changes": [_change_report(trial, criterion.verdict(trial)) for trial in trials],
        "recommendation": (
            None if chosen is None else _change_report(chosen, criterion.verdict(chosen))
        ),
        "claims": [_claim_report(claim, trials) for claim in CLAIMS],
        "tuned_config": None,
    }


def _change_report(trial: TuningTrial, verdict: Verdict) -> TuningChangeReport:
    change, is_measured = trial.change, bool(trial.pairs)
    speedup = trial.speedup() if is_measured else None
    memory = trial.memory_ratio() if is_measured else None
    traffic = trial.traffic_ratio() if is_measured else None
    steps = trial.steps_to_pay_off() if is_measured else None
    return {
        "name": change.name,
        "technique": change.technique,
        "values": dict(change.values),
        "changes_result": change.changes_result,
        "verdict": verdict,
        "reason": trial.error[1] if trial.error is not None else None,
        "rounds": len(trial.pairs),
        "speedup": speedup.mean if speedup else None,
        "speedup_interval": speedup.limits if speedup else None,
        "memory_ratio": memory.mean if memory else None,
        "memory_interval": memory.limits if memory else None,
        "traffic_ratio": traffic.mean if traffic else None,
        "loss_difference": trial.loss_difference() if is_measured else None,
        "first_step_extra_s": trial.extra_first_step_s() if is_measured else None,
        "steps_to_pay_off": None if steps is None else math.ceil(steps),
    }


def _claim_report(claim: TechniqueClaim, trials: Sequence[TuningTrial]) -> ClaimReport:
    """Return what the first measured change of the technique gave."""
    measured = next(
        (trial for trial in trials if trial.change.technique == claim.technique and trial.pairs),
        None,
    )
    value = None if measured is None else _measured_claim(claim, measured)
    return {
        "technique": claim.technique,
        "claim": claim.text,
        "source": claim.source,
        "url": claim.url,
        "source_says": claim.says,
        "figure": claim.figure,
        "measured": None if value is None else value.mean,
        "measured_interval": None if value is None else value.limits,
    }


def _measured_claim(claim: TechniqueClaim, trial: TuningTrial) -> Estimate | None:
    """Return the saved share of the traffic or the memory, or the ratio of the throughputs, of a
    run with the technique relative to one without."""
    ratios = {
        "throughput": trial.speedup,
        "memory": trial.memory_ratio,
        "traffic": trial.traffic_ratio,
    }
    ratio = ratios[claim.figure]()
    if ratio is None:
        return None
    if not trial.change.turns_on:
        ratio = ratio.inverse()
    return ratio if claim.figure == "throughput" else ratio.complement()

"""A search for the best values with Optuna, which also stops runs that are worse than others."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from paceline.core.event_log import effective_events, read_events
from paceline.core.formatting import counted
from paceline.sweep.metric import Metric
from paceline.sweep.space import SampledRange, SweepSpace, Values
from paceline.sweep.state import SweepRun, SweepState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

logger = logging.getLogger(__name__)

#: How many suggestions that have been run already follow each other before the search ends.
_MAX_REPEATED = 100
_PREFIX = "trial-"


class Search:
    """Suggests the runs of a sweep with Optuna's tree-structured Parzen estimator and prunes them
    with its median rule.

    The study is in memory only: it is made again from the state of the sweep.

    Args:
        num_trials: number of runs in all, including the runs of earlier commands.
        seed: seed of the suggestions.
        prunes: whether to stop runs early.
    """

    def __init__(
        self,
        space: SweepSpace,
        state: SweepState,
        metric: Metric,
        num_trials: int,
        seed: int,
        prunes: bool,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.needs_values = prunes
        self.state = state
        self.num_trials = num_trials
        self._axes = space.axes
        self._distributions = {axis.key: _distribution(axis) for axis in space.axes}
        self.runs = [run for run in state.runs if is_in_space(run, space)]
        self._remaining = [run for run in self.runs if run["status"] not in ("done", "pruned")]
        self._metric = metric
        self._trials: dict[str, Trial] = {}  # by the name of the run
        self._steps: dict[str, set[int]] = {}  # with a reported value, by the name of the run
        self._number = 0
        # Few runs are needed before the median means something, and a short search has no more.
        num_startup = max(1, min(5, num_trials // 4))
        self._study = optuna.create_study(
            direction="maximize" if metric.maximize else "minimize",
            # A search that continues must not repeat the random suggestions of its beginning.
            sampler=optuna.samplers.TPESampler(seed=seed + len(self.runs)),
            pruner=optuna.pruners.MedianPruner(num_startup) if prunes else None,
        )
        for run in self.runs:
            if run not in self._remaining:
                self._study.add_trial(self._as_trial(run))

    def next_run(self) -> SweepRun | None:
        if self._remaining:
            run = self._remaining.pop(0)
            self._study.enqueue_trial(self._parameters(run))
            trial = self._ask()
        elif len(self.runs) < self.num_trials:
            suggestion = self._suggest()
            if suggestion is None:
                return None
            trial, arguments = suggestion
            run = self.state.add(arguments, f"{_PREFIX}{self._next_number():03d}")
            self.runs.append(run)
        else:
            return None
        self._trials[run["name"]] = trial
        self._steps[run["name"]] = set()
        self._number = self.runs.index(run) + 1
        return run

    def observe(self, run: SweepRun, step: int, value: float) -> bool:
        steps = self._steps[run["name"]]
        if step in steps:
            return False  # a run that was restarted has evaluated this step before
        steps.add(step)
        trial = self._trials[run["name"]]
        trial.report(value, step)
        return bool(trial.should_prune())

    def finish(self, run: SweepRun) -> None:
        from optuna.trial import TrialState

        trial = self._trials.pop(run["name"])
        if run["status"] == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        elif run["status"] == "done" and run["metric"] is not None:
            self._study.tell(trial, run["metric"])
        else:
            self._study.tell(trial, state=TrialState.FAIL)

    def progress(self) -> str:
        return f"trial {self._number} of {self.num_trials}"

    def _ask(self) -> Trial:
        return self._study.ask(fixed_distributions=self._distributions)

    def _suggest(self) -> tuple[Trial, tuple[str, ...]] | None:
        """Return a trial with new values and its overrides, or None if there are no others."""
        from optuna.trial import TrialState

        for _ in range(_MAX_REPEATED):
            trial = self._ask()
            arguments = tuple(
                f"{axis.key}={_text(axis, trial.params[axis.key])}" for axis in self._axes
            )
            earlier = self.state.find(arguments)
            if earlier is None:
                return trial, arguments
            if earlier["status"] == "done" and earlier["metric"] is not None:
                self._study.tell(trial, earlier["metric"])
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        logger.info("the search ends after %s: no new values", counted(len(self.runs), "trial"))
        self.num_trials = len(self.runs)
        return None

    def _next_number(self) -> int:
        numbers = [
            int(run["name"].removeprefix(_PREFIX))
            for run in self.state.runs
            if run["name"].removeprefix(_PREFIX).isdigit()
        ]
        return max(numbers, default=0) + 1

    def _parameters(self, run: SweepRun) -> dict[str, JsonValue]:
        return {axis.key: value for axis, value in _axis_values(run, self._axes)}

    def _as_trial(self, run: SweepRun) -> Any:
        import optuna
        from optuna.trial import TrialState

        events = effective_events(read_events(self.state.run_dir(run).events))
        values = {
            event["step"]: value
            for event in events
            if event["type"] == "eval"
            and (value := self._metric.of_evaluation(event)) is not None
            and math.isfinite(value)
        }
        is_done = run["status"] == "done" and run["metric"] is not None
        state = TrialState.PRUNED if run["status"] == "pruned" else TrialState.FAIL
        return optuna.trial.create_trial(
            state=TrialState.COMPLETE if is_done else state,
            value=run["metric"] if is_done else None,
            params=self._parameters(run),
            distributions=self._distributions,
            intermediate_values=values,
        )


def is_in_space(run: SweepRun, space: SweepSpace) -> bool:
    """Return whether a search could have suggested this run of an earlier command."""
    if run["overrides"].keys() != {axis.key for axis in space.axes}:
        return False
    return all(axis.contains(value) for axis, value in _axis_values(run, space.axes))


def _axis_values(
    run: SweepRun, axes: Sequence[Values | SampledRange]
) -> list[tuple[Values | SampledRange, Any]]:
    """Return the value of each axis in a run: the text of :class:`Values`, the number of a
    range."""
    texts = dict(argument.split("=", 1) for argument in run["arguments"])
    return [
        (axis, texts[axis.key] if isinstance(axis, Values) else run["overrides"][axis.key])
        for axis in axes
    ]


def _distribution(axis: Values | SampledRange) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(axis, Values):
        return CategoricalDistribution(axis.values)
    if axis.is_integer:
        return IntDistribution(int(axis.low), int(axis.high), axis.is_log, int(axis.step or 1))
    return FloatDistribution(axis.low, axis.high, axis.is_log, axis.step)


def _text(axis: Values | SampledRange, value: Any) -> str:
    return str(value) if isinstance(axis, Values) else axis.text_of(value)

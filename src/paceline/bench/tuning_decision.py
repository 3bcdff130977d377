"""Which of the measured changes `paceline bench tuning` recommends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.bench.intervals import Estimate, geometric_estimate
from paceline.bench.short_runs import ShortRun
from paceline.bench.tuning_changes import TuningChange

#: What a change should improve.
Goal = Literal["time", "memory"]
#: ``unclear``: the confidence interval contains the margin, so a repetition could decide otherwise.
Verdict = Literal["recommended", "no gain", "unclear", "not supported", "failed"]

#: Share of the lowest and of the highest ratios that do not count. Other processes, or the other
#: guests of a virtual machine's host, slow down single runs by a third.
_TRIM = 0.2


@dataclass
class TuningTrial:
    """The runs of a change, each with the run of the unchanged config next to it.

    Attributes:
        pairs: (unchanged, changed) runs, in the order of the rounds.
        error: why there are no runs: ``not supported`` or ``failed``, and the message.
    """

    change: TuningChange
    pairs: list[tuple[ShortRun, ShortRun]] = field(default_factory=list)
    error: tuple[Literal["not supported", "failed"], str] | None = None

    def speedup(self) -> Estimate:
        """Return how many times as fast the changed config is: the ratio of the tokens or samples
        per second."""
        return geometric_estimate(
            [_rate(changed) / _rate(unchanged) for unchanged, changed in self.pairs], _TRIM
        )

    def memory_ratio(self) -> Estimate | None:
        """Return the peak memory, relative to the unchanged config; None if unknown."""
        return self._ratio("peak_memory_bytes")

    def traffic_ratio(self) -> Estimate | None:
        """Return the bytes that are sent, relative to the unchanged config; None if there are
        none."""
        return self._ratio("traffic_bytes")

    def _ratio(self, name: str) -> Estimate | None:
        values = [
            (getattr(unchanged, name), getattr(changed, name)) for unchanged, changed in self.pairs
        ]
        if not all(before and after for before, after in values):
            return None
        return geometric_estimate([after / before for before, after in values], _TRIM)

    def loss_difference(self) -> float:
        """Return the largest relative difference of a step's training loss, on the same samples."""
        return max(
            abs(after - before) / max(abs(before), 1e-12)
            for unchanged, changed in self.pairs
            for before, after in zip(unchanged.losses, changed.losses, strict=True)
        )

    def extra_first_step_s(self) -> float:
        """Return by how much longer the first step takes, for compilation: mean over the runs."""
        return sum(
            changed.first_step_s - unchanged.first_step_s for unchanged, changed in self.pairs
        ) / len(self.pairs)

    def steps_to_pay_off(self) -> float | None:
        """Return the number of steps after which the faster steps have made up for a longer first
        step; None if steps are not faster."""
        gain_s = sum(
            unchanged.mean_step_s - changed.mean_step_s for unchanged, changed in self.pairs
        ) / len(self.pairs)
        return max(0.0, self.extra_first_step_s()) / gain_s if gain_s > 0 else None


def _rate(run: ShortRun) -> float:
    return run.work / run.mean_step_s


@dataclass(frozen=True)
class Criterion:
    """When a change is recommended.

    Attributes:
        goal: what it should improve.
        margin: smallest gain that counts, as a share.
        planned_steps: number of steps of the config's run; None if it is unknown.
    """

    goal: Goal
    margin: float
    planned_steps: int | None = None

    def gain(self, trial: TuningTrial) -> Estimate | None:
        """Return the gain as a ratio, above 1 if the change is better: of the speed, or of the
        memory that is no longer needed. None if it was not measured."""
        if self.goal == "time":
            return trial.speedup()
        memory = trial.memory_ratio()
        return None if memory is None else memory.inverse()

    def verdict(self, trial: TuningTrial) -> Verdict:
        """Return the verdict on a change. It is recommended only if the whole confidence interval
        of its gain is above ``1 + margin``, so that a repetition leads to the same verdict, and if
        the planned run is long enough for it to pay off."""
        if trial.error is not None:
            return trial.error[0]
        gain = self.gain(trial)
        if gain is None or gain.low is None or gain.high is None:
            return "unclear"
        if gain.high < 1 + self.margin:
            return "no gain"
        if gain.low <= 1 + self.margin:
            return "unclear"
        steps, planned = trial.steps_to_pay_off(), self.planned_steps
        if self.goal == "time" and planned is not None and steps is not None and steps > planned:
            return "no gain"
        return "recommended"

    def select(self, trials: Sequence[TuningTrial]) -> list[TuningTrial]:
        """Return the recommended changes, best first. Of those that set the same key, the one with
        the larger gain is selected."""
        recommended = [trial for trial in trials if self.verdict(trial) == "recommended"]
        selected: list[TuningTrial] = []
        for trial in sorted(recommended, key=lambda trial: self._limits(trial)[0], reverse=True):
            keys = {key for other in selected for key in other.change.values}
            if not keys & set(trial.change.values):
                selected.append(trial)
        return selected

    def _limits(self, trial: TuningTrial) -> list[float]:
        """Return the interval of the gain of a recommended change."""
        gain = self.gain(trial)
        assert gain is not None
        assert gain.limits is not None
        return gain.limits

    def choose(
        self, selected: Sequence[TuningTrial], combined: TuningTrial | None
    ) -> TuningTrial | None:
        """Return what to recommend: all selected changes together if this is measurably better than
        no change and not measurably worse than the best change alone; otherwise that one.

        Args:
            combined: the trial of all selected changes; None if there are fewer than two.
        """
        if not selected:
            return None
        best = selected[0]
        if combined is None or self.verdict(combined) != "recommended":
            return best
        # A comparison of the means would be decided by noise if the other changes gain little.
        return combined if self._limits(combined)[1] >= self._limits(best)[0] else best


def combined_change(trials: Sequence[TuningTrial]) -> TuningChange:
    """Return the change that makes all of these changes. Its name does not depend on their order,
    so that two measurements with the same result recommend a change of the same name."""
    trials = sorted(trials, key=lambda trial: trial.change.name)
    effects = [trial.change.changes_result for trial in trials]
    return TuningChange(
        " + ".join(trial.change.name for trial in trials),
        "combination",
        {key: value for trial in trials for key, value in trial.change.values.items()},
        changes_result="; ".join(effect for effect in effects if effect) or None,
    )

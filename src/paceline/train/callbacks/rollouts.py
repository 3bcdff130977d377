"""The callback that writes rollouts to files, and stores them in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.report import RolloutFigures
from paceline.rollouts.advantages import deviations, have_equal_rewards
from paceline.rollouts.decoding import tool_figures
from paceline.rollouts.records import (
    FOLDER,
    Rollout,
    groups_of_records,
    records_of,
    write_rollout,
)
from paceline.train.callbacks.base import Callback

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.train.rollouts.pipeline import RolloutPipeline
    from paceline.train.state import StepResult, TrainState


class RolloutRecorder(Callback):
    """Records the rollouts of a run.

    A checkpoint between two updates on one rollout contains the rollout; after the last update on
    it, the next one is generated again with the same bits.

    Args:
        data: the pipeline whose rollouts are recorded.
        output_dir: the run's folder.
        writes: whether this rank writes the files.
    """

    def __init__(self, data: RolloutPipeline, output_dir: Path, writes: bool) -> None:
        self.data, self.folder = data, output_dir / FOLDER
        self.writes = writes
        self._steps: list[RolloutFigures] = []
        data.on_rollout = self._record

    def _record(self, rollout: Rollout) -> None:
        keep = self.data.settings.keep_rollouts
        if self.writes and keep:
            write_rollout(self.folder, rollout, self.data.scorer.names, keep)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if result.outcome == "updated" and self.data.rollout is not None:
            self._steps.append(figures_of(self.data.rollout, self.data))

    def take(self) -> RolloutFigures | None:
        """Return the means over the steps since the last call."""
        steps, self._steps = self._steps, []
        return mean_figures(steps) if steps else None

    # -- checkpoints
    def state_dict(self) -> Mapping[str, JsonValue]:
        is_dynamic = self.data.settings.dynamic_sampling
        drawn = {"drawn": self.data.num_drawn} if is_dynamic else {}
        rollout = self.data.rollout
        if rollout is None or self.data.next_begins_rollout:
            return drawn
        stored: Any = {
            **drawn,
            "step": rollout.step,
            "records": records_of(rollout, self.data.scorer.names),
            "old_logps": rollout.old_logps,
            "reference_logps": rollout.reference_logps,
            "skipped": rollout.num_skipped,
        }
        return stored  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        stored: Any = state
        self._steps = []
        self.data.num_drawn = int(stored.get("drawn", 0))
        self.data.rollout = None
        if "records" not in stored:
            return
        settings, names = self.data.settings, self.data.scorer.names
        groups = groups_of_records(stored["records"], names, settings.num_generations)
        advantages = np.array([record["advantage"] for record in stored["records"]])
        self.data.rollout = Rollout(
            step=int(stored["step"]),
            groups=groups,
            rewards=self.data.weigh(groups),
            advantages=advantages.reshape(len(groups), -1),
            old_logps=stored["old_logps"],
            reference_logps=stored["reference_logps"],
            num_skipped=int(stored["skipped"]),
        )


def figures_of(rollout: Rollout, data: RolloutPipeline) -> RolloutFigures:
    """Return the figures of a step that trains on a rollout."""
    scores = np.concatenate([group.scores for group in rollout.groups])
    completions = [completion for _, completion in rollout.completions]
    figures: RolloutFigures = {
        "reward": _mean(rollout.rewards),
        "reward_std": float(deviations(rollout.rewards).mean()),
        "rewards": {
            name: _mean(scores[:, number]) for number, name in enumerate(data.scorer.names)
        },
        "zero_std_groups": float(have_equal_rewards(rollout.rewards).sum()),
        "skipped_groups": float(rollout.num_skipped),
        "completion_length": float(np.mean([len(each.ids) for each in completions])),
        "truncated": float(np.mean([each.is_truncated for each in completions])),
        "rollout_s": data.times.rollout_s,
        "reward_s": data.times.reward_s,
    }
    if rollout.calls_tools:
        figures["tool_calls"], figures["tool_failures"] = tool_figures(completions)
    return figures


def mean_figures(steps: list[RolloutFigures]) -> RolloutFigures:
    """Return the means of the figures of several steps; of the steps that have a value."""
    rewards = {
        name: _mean_of_known([step["rewards"][name] for step in steps])
        for name in steps[0]["rewards"]
    }
    numbers: Any = {
        name: _mean_of_known([step[name] for step in steps])  # type: ignore[literal-required]
        for name in steps[0]
        if name != "rewards"
    }
    return {"rewards": rewards, **numbers}  # type: ignore[typeddict-item]


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _mean_of_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

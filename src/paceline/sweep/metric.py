"""The metric by which the runs of a sweep are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from paceline.config.metrics.evaluation import is_lower_better
from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.event_log import effective_events
from paceline.core.events import EvalEvent, Event
from paceline.core.formatting import finite, number

#: Metrics that are not from an evaluation → the key of ``report.json``.
_OF_REPORT = {"train_loss": "final_train_loss", "tokens_per_second": "tokens_per_second"}


@dataclass(frozen=True)
class Metric:
    """A metric, and whether a higher value is better.

    Args:
        name: ``train_loss``, ``tokens_per_second``, ``eval_loss``, or the name of another metric of
            the evaluations, with or without ``eval_`` before it.
    """

    name: str
    maximize: bool

    @property
    def is_of_evaluation(self) -> bool:
        return self.name not in _OF_REPORT

    def of_evaluation(self, event: EvalEvent) -> float | None:
        """Return the value in an evaluation, which may be NaN or infinite; None if it is not
        there."""
        name = self.name.removeprefix("eval_")
        if name == "loss":
            return number(event.get("loss"))
        metrics = event.get("metrics") or {}
        return number(metrics.get(name, metrics.get(self.name)))

    def of_run(self, report: Mapping[str, JsonValue], events: Sequence[Event]) -> float | None:
        """Return the value of a run: the value of the last evaluation, or of the best one if the
        run ends with its weights. None if it is unknown or not finite."""
        if not self.is_of_evaluation:
            return finite(report.get(_OF_REPORT[self.name]))
        evals = [event for event in effective_events(events) if event["type"] == "eval"]
        best = report.get("best")
        if isinstance(best, dict) and best.get("is_final"):
            evals = [event for event in evals if event["step"] == best["step"]] or evals
        return finite(self.of_evaluation(evals[-1])) if evals else None

    def sort_key(self, value: float | None) -> tuple[bool, float]:
        """Return a key that sorts the best value first and unknown values last."""
        if value is None:
            return True, 0.0
        return False, -value if self.maximize else value


def choose_metric(name: str | None, maximize: bool | None, has_evaluations: bool) -> Metric:
    """Return the metric of a sweep.

    Args:
        name: the requested metric; None for ``eval_loss`` or, without evaluations, ``train_loss``.
        maximize: whether a higher value is better; None to decide by the name.
    """
    name = name or ("eval_loss" if has_evaluations else "train_loss")
    return Metric(name, not is_lower_better(name) if maximize is None else maximize)


def check_metric(metric: Metric, has_evaluations: bool, names: Sequence[str] | None) -> None:
    """Raise ConfigError if the runs do not report the metric.

    Args:
        has_evaluations: whether every run evaluates.
        names: the results of an evaluation; None if they are not known before one.
    """
    if not metric.is_of_evaluation:
        return
    if not has_evaluations:
        raise ConfigError(
            "`--metric {metric}` is a metric of evaluations, and not every run evaluates",
            code="no-evaluation",
            fix="set `val_dataset` or `split_dataset_ratio=0.05`, or use `--metric train_loss`",
            metric=metric.name,
        )
    if names is None or {metric.name, metric.name.removeprefix("eval_")} & set(names):
        return
    known = [*(f"eval_{name}" for name in names), *_OF_REPORT]
    raise ConfigError(
        "`--metric {metric}`: evaluations have no such metric",
        code="unknown-sweep-metric",
        allowed=", ".join(known),
        fix=did_you_mean(
            metric.name, known, "choose one of these; `evaluation.metrics` adds metrics of answers"
        ),
        metric=metric.name,
    )

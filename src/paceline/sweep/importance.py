"""How much the parameters of a sweep decide whether a run is among the best."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.observe.report.parameters import value_text
from paceline.sweep.metric import Metric
from paceline.sweep.state import SweepRun

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: With fewer runs, the importances say nothing.
_MIN_RUNS = 4
#: The importances are for being among this share of the runs.
_BEST_SHARE = 0.25
#: A parameter with more values is taken as a number, and otherwise as a choice.
_MAX_CHOICES = 8


def parameter_importance(runs: Sequence[SweepRun], metric: Metric) -> dict[str, float] | None:
    """Return the importance of each parameter, which add up to 1, the most important one first.

    None without Optuna, with fewer than two parameters that have several values, and with too few
    runs that were made to their end. The runs are from a grid or from a search.
    """
    if importlib.util.find_spec("optuna") is None:
        return None
    done = [run for run in runs if run["status"] == "done" and run["metric"] is not None]
    common = [key for key in (done[0]["overrides"] if done else {})
              if all(key in run["overrides"] for run in done)]  # fmt: skip
    keys = [key for key in common if len({value_text(run["overrides"][key]) for run in done}) > 1]
    if len(done) < _MIN_RUNS or len(keys) < 2:
        return None
    shares = _evaluate(done, keys, metric)
    total = sum(shares.values())
    if not total > 0:
        return None
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return {key: round(share / total, 4) for key, share in ranked}


def _evaluate(runs: Sequence[SweepRun], keys: Sequence[str], metric: Metric) -> dict[str, float]:
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if metric.maximize else "minimize")
    distributions = {key: _distribution([run["overrides"][key] for run in runs]) for key in keys}
    for run in runs:
        parameters = {
            key: value_text(run["overrides"][key]) if is_choice else run["overrides"][key]
            for key, (_, is_choice) in distributions.items()
        }
        study.add_trial(
            optuna.trial.create_trial(
                value=run["metric"],
                params=parameters,
                distributions={key: each for key, (each, _) in distributions.items()},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the class is marked as experimental
        evaluator = PedAnovaImportanceEvaluator(target_quantile=_BEST_SHARE)
        return get_param_importances(study, evaluator=evaluator, normalize=False)


def _distribution(values: Sequence[object]) -> tuple[BaseDistribution, bool]:
    """Return the distribution of the values of a parameter, and whether it is a choice."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    texts = list(dict.fromkeys(value_text(value) for value in values))
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(texts) <= _MAX_CHOICES or len(numbers) < len(values):
        return CategoricalDistribution(texts), True
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=low > 0 and high > 20 * low), False

"""The metric by which evaluations are compared, as `train_args` describes it. Imports no torch."""

from collections.abc import Collection

from paceline.config.metrics.evaluation import is_lower_better
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError, did_you_mean


def selects_best_model(args: TrainArgs) -> bool:
    """Return whether evaluations are compared."""
    needs_best = args.load_best_model_at_end or args.save_best
    return needs_best or args.early_stopping is not None or bool(args.metric_for_best_model)


def best_metric(args: TrainArgs) -> tuple[str, bool]:
    """Return the name of the metric by which evaluations are compared, and whether a higher one is
    better."""
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    greater = args.greater_is_better
    return name, not is_lower_better(name) if greater is None else greater


def check_best_metric(args: TrainArgs, names: Collection[str] | None) -> None:
    """Raise ConfigError if evaluations have no metric of this name.

    Args:
        names: the metrics of an evaluation; None if they are not known.
    """
    name, _ = best_metric(args)
    if names is None or name in names or not selects_best_model(args):
        return
    raise ConfigError(
        "`train_args.metric_for_best_model: {metric_for_best_model}`: evaluations have no such"
        " metric",
        code="unknown-best-metric",
        allowed=", ".join(names),
        fix=did_you_mean(
            name, names, "set one of these; `evaluation.metrics` adds metrics of generated answers"
        ),
        metric_for_best_model=args.metric_for_best_model,
    )

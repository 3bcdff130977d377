"""The names in ``evaluation.metrics``, and what they need. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from paceline.config.packages import check_package
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError, did_you_mean

#: Metrics of the predictions of the next token, over all label tokens.
LABEL_METRICS = ("token_accuracy", "perplexity")
#: Metrics that compare generated answers with their references → the module that they need.
GENERATED_METRICS = {
    "exact_match": None,
    "f1": None,
    "rouge": "rouge_score",
    "bleu": "sacrebleu",
    "chrf": "sacrebleu",
    "ter": "sacrebleu",
}
_FORM = "./metrics.py:function"


def is_user_metric(name: str) -> bool:
    """Return whether a metric is a function of the user, as ``./metrics.py:function``."""
    return ":" in name


def is_lower_better(name: str) -> bool:
    """Return whether a lower value of a metric is better, judging by its name. ``ter`` is the
    translation edit rate."""
    return name == "ter" or name.endswith(("loss", "perplexity", "error"))


def generated_metrics(names: Sequence[str]) -> list[str]:
    """Return the metrics that are computed from generated answers."""
    return [name for name in names if name in GENERATED_METRICS or is_user_metric(name)]


#: Metrics with several values → the names of the values.
_VALUES = {"rouge": ("rouge1", "rouge2", "rougeL")}


def value_names(names: Sequence[str]) -> list[str] | None:
    """Return the names of the values of metrics; None if a function of the user determines them."""
    if any(is_user_metric(name) for name in names):
        return None
    return [value for name in names for value in _VALUES.get(name, (name,))]


def check_metrics(config: Config) -> None:
    """Raise ConfigError if a metric does not exist, if it does not fit the task, or if its package
    is not installed."""
    names = config.evaluation.metrics
    if not names:
        return
    known = (*LABEL_METRICS, *GENERATED_METRICS)
    for name in names:
        if name not in known and not is_user_metric(name):
            raise ConfigError(
                "`evaluation.metrics` names `{name}`, which does not exist",
                code="unknown-metric",
                allowed="{known}; your own function as {form}",
                fix=did_you_mean(name.lower(), known, "choose one of these"),
                name=name,
                known=", ".join(known),
                form=_FORM,
            )
    _check_task(config, names)
    for name in names:
        module = GENERATED_METRICS.get(name)
        if module is not None:
            check_package(
                module, f"`evaluation.metrics: {name}`", "remove the metric", extra="metrics"
            )


def check_lm_eval(config: Config) -> None:
    """Raise ConfigError if lm-evaluation-harness cannot evaluate the model."""
    settings = config.evaluation.lm_eval
    if settings is None:
        return
    if config.task not in CAUSAL_TASKS:
        raise ConfigError(
            "`evaluation.lm_eval` is not supported with `task: {task}`: it evaluates language"
            " models",
            code="lm-eval-with-task",
            allowed="a task that trains one: {causal_tasks}",
            fix="remove it",
            task=config.task,
            causal_tasks=", ".join(CAUSAL_TASKS),
        )
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise ConfigError(
            "`evaluation.lm_eval.include_path: {include_path}` is not a folder",
            code="lm-eval-missing-folder",
            fix="give the folder with the YAML files of the tasks",
            include_path=settings.include_path,
        )
    check_package("lm_eval", "`evaluation.lm_eval`", "remove it", extra="lm-eval")


def idle_notice(config: Config) -> str | None:
    """Return a warning if there are settings of evaluations but no validation data."""
    eval_steps = config.train_args.eval_steps
    settings = {
        f"`train_args.eval_steps: {eval_steps}`": eval_steps not in (0, "never"),
        "`evaluation.metrics`": bool(config.evaluation.metrics),
    }
    names = [name for name, is_set in settings.items() if is_set]
    if config.val_dataset is not None or config.split_dataset_ratio > 0 or not names:
        return None
    return (
        f"{' and '.join(names)} {'have' if len(names) > 1 else 'has'} no effect without validation"
        " data: set `val_dataset`, or `split_dataset_ratio: 0.05`"
    )


def _check_task(config: Config, names: Sequence[str]) -> None:
    if config.task not in ("sft", "pretrain"):
        raise ConfigError(
            "`evaluation.metrics: [{names}]` is not supported with `task: {task}`: these are"
            " metrics of text",
            code="text-metrics-with-task",
            allowed="`task: sft` or `pretrain`; other tasks report their own metrics",
            fix="remove `evaluation.metrics`",
            names=", ".join(names),
            task=config.task,
        )
    generated = generated_metrics(names)
    if generated and config.task == "pretrain":
        raise ConfigError(
            "`evaluation.metrics: [{generated}]` is not supported with `task: pretrain`: its rows"
            " have no answers to compare with",
            code="answer-metrics-with-pretrain",
            allowed=", ".join(LABEL_METRICS),
            fix="remove these metrics, or set `task: sft`",
            generated=", ".join(generated),
        )

"""Evaluation of a trained model with lm-evaluation-harness (extra ``lm-eval``)."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.packages import check_package
from paceline.config.schema.evaluation import LmEval
from paceline.core.errors import ConfigError, first_line
from paceline.core.report import LmEvalReport
from paceline.inference.device import inference_device
from paceline.inference.loading import load_model


def evaluate_model(run: Path, settings: LmEval) -> LmEvalReport:
    """Return the results of the tasks.

    Raises:
        ConfigError: the package is not installed, a task does not exist, or its data cannot be
            read.
    """
    check_package("lm_eval", "`paceline eval`", "use another tool", extra="lm-eval")
    # It warns that the model is already loaded.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval import __version__, simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=settings.include_path)
    unknown = [name for name in settings.tasks if name not in tasks.all_tasks]
    if unknown:
        raise ConfigError(
            "lm-evaluation-harness has no task `{unknown}`",
            code="unknown-lm-eval-task",
            allowed="the names that `lm-eval ls tasks` prints, and those in `--include-path`",
            fix="check the name",
            unknown=unknown[0],
        )
    model, tokenizer = load_model(run)
    device = inference_device()
    try:
        output: Any = simple_evaluate(
            HFLM(model.to(device), tokenizer=tokenizer, batch_size=settings.batch_size),
            tasks=settings.tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=settings.apply_chat_template,
            task_manager=tasks,
            log_samples=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the tasks cannot be evaluated: {reason}",
            code="lm-eval-failed",
            fix="check the tasks and their data",
            reason=first_line(error),
        ) from error
    return {
        "results": {task: _metrics(values) for task, values in output["results"].items()},
        "versions": output["versions"],
        "num_rows": {task: rows["effective"] for task, rows in output["n-samples"].items()},
        "lm_eval": __version__,
    }


def _metrics(values: Mapping[str, float | str]) -> dict[str, float]:
    """Return the metrics of a task. The harness adds the name of a filter: ``acc,none``."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name
    }

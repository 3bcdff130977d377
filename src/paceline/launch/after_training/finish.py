"""What the launcher does when a run is done: add it to the machine's history, evaluate the model
with lm-evaluation-harness, and upload it to the hub. A failure is reported and does not change the
outcome of the run."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from paceline.config.chosen import read_chosen
from paceline.config.schema import Config
from paceline.core.errors import EXIT_DONE, RunError
from paceline.core.report import HubUpload, LmEvalReport, Report
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.planner.machine.history import append, run_of
from paceline.planner.search.memory_history import remember
from paceline.train.run_spec import TrainResult

logger = logging.getLogger(__name__)


def finish_run(result: TrainResult, config: Config, history_key: str | None = None) -> TrainResult:
    """Add a run that is done to this machine's history, and evaluate and upload its model, as the
    config requests. Called by one process, after the ranks have ended.

    Args:
        history_key: key under which the run's memory settings are stored if it has run out of
            memory meanwhile; None to store none.

    Returns:
        The result, with the report that now has the keys ``lm_eval`` and ``hub``.
    """
    if result.report is not None and result.exit_code == EXIT_DONE:
        _remember(result.report, config)
        if history_key is not None and result.report.get("memory_fallbacks"):
            _remember_memory(history_key, config)
    is_requested = config.evaluation.lm_eval is not None or config.train_args.push_to_hub
    if not is_requested or result.report is None or result.exit_code != EXIT_DONE:
        return result
    run_dir = RunDir(Path(config.output_dir))
    report = result.report.copy()
    if config.evaluation.lm_eval is not None:
        report["lm_eval"] = _evaluate(run_dir)
        _write(run_dir, report)
    if config.train_args.push_to_hub:  # the card has the results of the evaluation
        report["hub"] = _upload(run_dir, config)
        _write(run_dir, report)
    return replace(result, report=report)


def _remember(report: Report, config: Config) -> None:
    """Save the predicted and the measured step time for later plans."""
    run = run_of(report, config.model, config.output_dir)
    try:
        if run is not None:
            append(run)
    except OSError as error:
        logger.warning(
            UserText(
                "the run could not be added to the history of `paceline plan`: {reason}",
                code="history-not-stored",
                reason=error,
            )
        )


def _remember_memory(history_key: str, config: Config) -> None:
    """Save the memory settings with which a run succeeded after it had run out of memory."""
    try:
        remember(history_key, read_chosen(RunDir(Path(config.output_dir)).config))
    except OSError as error:
        logger.warning(
            UserText(
                "the memory settings could not be stored for later runs: {reason}",
                code="memory-settings-not-stored",
                reason=error,
            )
        )


def _write(run_dir: RunDir, report: Report) -> None:
    from paceline.observe.report.html import write_reports

    write_reports(run_dir, report)


def _evaluate(run_dir: RunDir) -> LmEvalReport:
    """Run ``paceline eval`` in a process of its own, which imports torch and frees its memory."""
    logger.info(
        UserText(
            "evaluating {model} with lm-evaluation-harness",
            code="lm-eval-starts",
            model=run_dir.model,
        )
    )
    command = [sys.executable, "-m", "paceline", "eval", str(run_dir.root), "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode != EXIT_DONE:
        logger.warning(
            UserText(
                "lm-evaluation-harness failed, which does not affect the model; `paceline eval"
                " {root}` repeats the evaluation",
                code="lm-eval-not-finished",
                root=run_dir.root,
            )
        )
        return {"error": f"`paceline eval` ended with exit code {process.returncode}"}
    results: LmEvalReport = json.loads(process.stdout)
    for task, metrics in results["results"].items():
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        logger.info(UserText("{task}: {values}", code="lm-eval-result", task=task, values=values))
    return results


def _upload(run_dir: RunDir, config: Config) -> HubUpload:
    from paceline.launch.after_training.hub_upload import repository_of, upload_model

    repository = repository_of(config)
    try:
        repository, url = upload_model(
            run_dir.model, run_dir.root, repository, config.train_args.hub_private_repo
        )
    except RunError as error:
        logger.warning(error.paragraph())
        return {"repository": repository, "url": None, "error": error.what}
    logger.info(
        UserText(
            "uploaded to {repository}: {url}", code="model-uploaded", repository=repository, url=url
        )
    )
    return {"repository": repository, "url": url, "error": None}

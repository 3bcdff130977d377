"""The result of a run, for the command or the caller, and what is logged of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.core.errors import EXIT_DONE, EXIT_SIGINT, EXIT_SIGTERM, EXIT_USAGE, ConfigError
from paceline.core.failures import ExitRecord, ReportedError
from paceline.core.log import CONSOLE_ONLY, write_line
from paceline.core.report import Report
from paceline.observe.console import derived_lines
from paceline.train.run_spec import TrainResult

if TYPE_CHECKING:
    from pydantic import JsonValue

logger = logging.getLogger(__name__)

_STOP_CODES = (EXIT_SIGINT, EXIT_SIGTERM)


def result_of(ended: ExitRecord, config: Config, *, debug: bool) -> TrainResult:
    """Convert the record of a launcher or of this rank into the result of the run.

    Args:
        debug: whether to print the traceback of a failure.

    Raises:
        ConfigError: if a rank rejected the config.
        ReportedError: if the run failed.
    """
    if ended.status == "finished":
        report: Report = ended.report
        log_finished(config, report.get("steps"))
        return TrainResult(EXIT_DONE, report)
    if ended.status == "failed":
        if debug and ended.traceback:
            write_line(ended.traceback)
        if ended.exit_code == EXIT_USAGE:
            raise ConfigError.from_record(ended.cause.record(ended.message))
        raise ReportedError(ended.message, ended.exit_code, ended.failure)
    if ended.status == "stopped" and ended.report is None and ended.exit_code in _STOP_CODES:
        logger.info("stopped before training began", extra=CONSOLE_ONLY)
        return TrainResult(ended.exit_code)
    return TrainResult(ended.exit_code, ended.report)


def log_finished(config: Config, steps: JsonValue) -> None:
    """Log that the run in the output folder is already complete."""
    folder = config.output_dir
    logger.info(
        f"{folder}: run already finished after {steps} steps; nothing to do. Report:"
        f" {folder}/report.html. For a new run, set another `output_dir` or delete the folder",
        extra=CONSOLE_ONLY,
    )


def log_derived(derived: Mapping[str, float | None]) -> None:
    """Log the values derived from a config."""
    for label, text in derived_lines(derived):
        logger.info("%-14s %s", label, text, extra=CONSOLE_ONLY)

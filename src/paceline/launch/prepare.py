"""What every way of starting a run shares: its options, this host's devices, and its result."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config.derive import ResolvedValues
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_USAGE,
    ConfigError,
    ReportedError,
)
from paceline.core.log import CONSOLE_ONLY, log_notices
from paceline.distributed.devices import choose_devices, with_precision, without_idle_offload
from paceline.launch.host_checks import quick_checks
from paceline.launch.preflight import check_early
from paceline.observe.console import derived_lines

if TYPE_CHECKING:
    from paceline.distributed.devices import Devices
    from paceline.distributed.environment import RankEnv

logger = logging.getLogger(__name__)

_STOP_CODES = (EXIT_SIGINT, EXIT_SIGTERM)


@dataclass(frozen=True)
class TrainOptions:
    """What the command line may set beside the config.

    Args:
        fault: content of the `fault` event, if an outer launcher has started the ranks again after
            a failure.
    """

    dry_run: bool = False
    debug: bool = False
    allow_config_change: bool = False
    fault: dict[str, Any] | None = None


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: the exit code of the process, and the report. Under an outer launcher such
    as torchrun every rank has it."""

    exit_code: int
    report: dict[str, Any] | None = None
    resolved: dict[str, Any] | None = None


@dataclass(frozen=True)
class PreparedHost:
    """This host's devices, and the config with what follows from them."""

    loaded: Loaded
    devices: Devices


def log_and_check(loaded: Loaded) -> None:
    """Log the notices of a config, and check what can be checked at once.

    Raises:
        ConfigError: the config cannot run.
    """
    log_notices(logger, loaded.notices)
    check_early(loaded.config)


def prepare_host(loaded: Loaded, outer: RankEnv | None) -> PreparedHost:
    """Choose this host's devices and the precision, and check what would make a run fail here.

    Raises:
        ConfigError: the devices that the config asks for do not exist, or this machine cannot run
            it.
    """
    config = loaded.config
    devices = choose_devices(
        config.parallel, ranks_given=None if outer is None else outer.local_world_size
    )
    log_notices(logger, devices.notices)
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    log_notices(logger, notices)
    config = config.model_copy(update={"parallel": parallel})
    for check in quick_checks(config, devices.type, devices.count):
        if check.fatal:
            raise ConfigError(
                f"this machine cannot run it: {check.name}: {check.value}", fix=check.advice
            )
        logger.warning("%s: %s; %s", check.name, check.value, check.advice)
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    logger.info(precision)
    return PreparedHost(replace(loaded, config=config), devices)


def result_of(outcome: dict[str, Any], options: TrainOptions, config: Config) -> TrainResult:
    """The result of a run, from what its launcher or this rank returned.

    Raises:
        ConfigError: a rank refused the config.
        ReportedError: the run failed.
    """
    if outcome["status"] == "finished":
        log_finished(config, outcome["report"])
        return TrainResult(EXIT_DONE, outcome["report"])
    if outcome["status"] == "failed":
        if options.debug and outcome.get("traceback"):
            sys.stderr.write(f"{outcome['traceback']}\n")
        if outcome["exit_code"] == EXIT_USAGE:
            raise ConfigError(outcome["text"])
        raise ReportedError(
            outcome["text"], outcome["exit_code"], would_repeat=outcome.get("fault") is False
        )
    has_report = outcome.get("report") is not None
    if outcome["status"] == "stopped" and not has_report and outcome["exit_code"] in _STOP_CODES:
        logger.info("stopped before the training began", extra=CONSOLE_ONLY)
        return TrainResult(outcome["exit_code"])
    return TrainResult(outcome["exit_code"], outcome["report"])


def log_finished(config: Config, report: dict[str, Any]) -> None:
    """Report that the run in the output folder is complete already."""
    folder = config.output_dir
    logger.info(
        "%s holds this run, done already: %s steps, nothing left to do",
        folder,
        report["steps"],
        extra=CONSOLE_ONLY,
    )
    logger.info(
        "for a new run set another output_dir, or delete the folder; the report: %s/report.html",
        folder,
        extra=CONSOLE_ONLY,
    )


def log_dry_run(derived: ResolvedValues) -> None:
    """Log what follows from the numbers of a config."""
    for label, text in derived_lines(derived.as_dict()):
        logger.info("%-14s %s", label, text, extra=CONSOLE_ONLY)

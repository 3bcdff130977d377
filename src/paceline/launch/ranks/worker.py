"""Entry point of a rank process: runs the rank and records how it ended for the launcher."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import (
    EXIT_FAILED,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    OutOfMemory,
    RunError,
    first_line,
)
from paceline.core.failures import ExitRecord, FailureKind, classify, classify_of_run
from paceline.core.log import configure_logging, mute_console
from paceline.core.processes import end_with_starter
from paceline.core.stop import StopFlag
from paceline.core.texts import UserText, translatable
from paceline.distributed.environment import RankEnv, from_environment
from paceline.distributed.timing.progress import PROGRESS
from paceline.launch.out_of_memory import explain
from paceline.launch.ranks.folder import STOP_FILE, RankFolder
from paceline.train.setup import run_rank

#: Runs a rank: (spec, environment, stop flag) → record with the status "done" or "stopped".
#: ``spec.config`` is the config of the run.
RunRank = Callable[[Any, RankEnv, StopFlag], ExitRecord]


def worker_main(spec: Any, folder: str, run: RunRank | None = None) -> None:
    """Run a rank that Paceline's own launcher has started.

    Args:
        folder: folder for the records of the ranks, which the launcher reads.
        run: function that the rank calls with the spec; default:
            :func:`~paceline.train.setup.run_rank`.
    """
    records = RankFolder(Path(folder))
    env = from_environment()
    if env.rank == 0:
        configure_logging()
    else:
        mute_console()
    end_with_starter()
    os.setpgid(0, 0)  # so that Ctrl-C reaches only the launcher, which forwards it once
    stop = StopFlag()
    stop.install(sigint=False)
    stop.fail = partial(_end_with_error, records, env)
    records.write_start(env)
    if (records.path / STOP_FILE).exists():
        records.write_end(env, ExitRecord("stopped"))
        return
    ended = run_guarded(spec, env, stop, run)
    records.write_end(env, ended)
    if ended.status == "failed":
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit immediately, because the other ranks wait for this one until its process has ended.
        os._exit(ended.exit_code)


def run_guarded(spec: Any, env: RankEnv, stop: StopFlag, run: RunRank | None = None) -> ExitRecord:
    """Run the rank and return how it ended, even if it raises an exception. For ``run`` see
    :func:`worker_main`."""
    try:
        ended = (run or run_rank)(spec, env, stop)
    except BaseException as error:  # the launcher must be informed of anything that ends a rank
        return _failed(error, env, spec)
    if ended.status == "stopped":
        exit_code = EXIT_SIGINT if stop.signal == signal.SIGINT else EXIT_SIGTERM
        return replace(ended, exit_code=exit_code)
    return ended


def _failed(error: BaseException, env: RankEnv, spec: Any) -> ExitRecord:
    failure, message, phase = classify(error, env.rank), None, ""
    if isinstance(error, OutOfMemory):
        failure, message = replace(failure, text=error.what), explain(error, spec)
    elif failure.kind is FailureKind.MEMORY:  # before the training, or in a run that is no training
        text = _out_of_memory_text(error, spec.config)
        failure = replace(failure, text=text, **translatable(text))
    if failure.kind is FailureKind.MEMORY:
        phase = PROGRESS.phase
    return ExitRecord.failed(failure, message, traceback=traceback.format_exc(), phase=phase)


def _out_of_memory_text(error: BaseException, config: Config) -> UserText:
    args = config.train_args
    return UserText(
        "Out of memory: {reason}. To fix: lower `per_device_train_batch_size` (now {batch_size})"
        " and raise `gradient_accumulation_steps` by the same factor (the result stays the same),"
        " lower `max_length` (now {max_length}), or set `gradient_checkpointing: full`,"
        " `precision: bf16-mixed` or `lora.enable: true`.",
        code="allocation-failed",
        reason=first_line(error),
        batch_size=args.per_device_train_batch_size,
        max_length=args.max_length,
    )


def _end_with_error(records: RankFolder, env: RankEnv, error: RunError) -> None:
    records.write_end(env, ExitRecord.failed(classify_of_run(error, env.rank)))
    sys.stderr.flush()
    os._exit(EXIT_FAILED)

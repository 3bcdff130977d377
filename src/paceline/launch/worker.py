"""Entry point of a rank process: runs the rank and writes its outcome for the launcher."""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    FaultError,
    MismatchError,
    Outcome,
    OutOfMemory,
    PacelineError,
    RunError,
    SaveError,
    failed_outcome,
    shared_outcome,
)
from paceline.core.files import write_atomic
from paceline.core.log import configure_logging, mute_console
from paceline.core.processes import end_with_starter
from paceline.core.stop import StopFlag
from paceline.distributed.environment import RankEnv, from_environment
from paceline.distributed.progress import PROGRESS
from paceline.launch.out_of_memory import explain
from paceline.observe.out_of_memory import is_out_of_memory
from paceline.train.setup import run_rank

STOP_FILE = "stop"

#: Messages with which Gloo, NCCL (RCCL, oneCCL) and CUDA (HIP, SYCL) report a lost peer, a broken
#: link or a failed device.
_LINK_OR_DEVICE_ERROR = re.compile(
    r"connection (closed|reset|refused)|timed? ?out|broken pipe|socket|NCCL|oneCCL|(CUDA|HIP)"
    r" error|UR_RESULT_ERROR_DEVICE_LOST|unhandled system error",
    re.IGNORECASE,
)

#: Python exceptions that the same code would raise again on the same data.
_REPEATABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip

#: Messages with which torch reports incompatible shapes, dtypes and indices.
_PROGRAM_ERROR = re.compile(
    r"size mismatch|must match|shapes? .*(cannot|invalid|incompatible|mismatch)|is invalid for"
    r" input of size|"
    r"out of (range|bounds)|expected (scalar type|all tensors|.*(dtype|dimension|size))|not"
    r" implemented for|"
    r"same (dtype|device|shape|size)|does not require grad|inplace operation|backward through the"
    r" graph a second",
    re.IGNORECASE,
)

#: Runs a rank: (spec, environment, stop flag) → {"status": "done" | "stopped", "report": …}.
#: ``spec.config`` is the config of the run.
RunRank = Callable[[Any, RankEnv, StopFlag], Outcome]


def outcome_file(folder: Path, local_rank: int) -> Path:
    """Return the path of the file with a rank's outcome in the launcher's folder."""
    return folder / f"outcome-{local_rank}.json"


def pid_file(folder: Path, local_rank: int) -> Path:
    """Return the path of the file with a rank's process ID in the launcher's folder."""
    return folder / f"pid-{local_rank}"


def worker_main(spec: Any, folder: str, run: RunRank | None = None) -> None:
    """Run a rank that Paceline's own launcher has started.

    Args:
        folder: folder of the launcher for process IDs and outcomes.
        run: function that the rank calls with the spec; default:
            :func:`~paceline.train.setup.run_rank`.
    """
    launcher_dir = Path(folder)
    env = from_environment()
    if env.rank == 0:
        configure_logging()
    else:
        mute_console()
    end_with_starter()
    os.setpgid(0, 0)  # so that Ctrl-C reaches only the launcher, which forwards it once
    stop = StopFlag()
    stop.install(sigint=False)
    stop.fail = partial(_end_with_error, launcher_dir, env)
    write_atomic(pid_file(launcher_dir, env.local_rank), str(os.getpid()))
    if (launcher_dir / STOP_FILE).exists():
        write_outcome(launcher_dir, env, {"status": "stopped", "report": None})
        return
    outcome = run_guarded(spec, env, stop, run)
    write_outcome(launcher_dir, env, outcome)
    if outcome["status"] == "failed":
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit immediately, because the other ranks wait for this one until its process has ended.
        os._exit(int(outcome["exit_code"]))


def run_guarded(spec: Any, env: RankEnv, stop: StopFlag, run: RunRank | None = None) -> Outcome:
    """Run the rank and return its outcome, even if it raises an exception. For ``run`` see
    :func:`worker_main`."""
    try:
        outcome = (run or run_rank)(spec, env, stop)
    except PacelineError as error:
        failed = _failed(env, error.exit_code, error.paragraph(), isinstance(error, FaultError))
        if isinstance(error, OutOfMemory):
            failed = _failed(env, error.exit_code, explain(error, spec), False)
            return {
                **failed,
                "out_of_memory": True,
                "phase": PROGRESS.phase,
                "reason": error.what,
            }
        blamed = getattr(error, "ranks", None)
        return {
            **failed,
            "every_rank": isinstance(error, SaveError),
            "of_all": isinstance(error, MismatchError) or blamed is not None,
            "blamed": blamed,
        }
    except BaseException as error:  # the launcher must be informed of anything that ends a rank
        fault = _is_fault(error)
        failed = _failed(env, EXIT_FAILED, describe(error, spec), fault)
        if is_out_of_memory(error):  # before the training, or in a run that is no training
            failed |= {"out_of_memory": True, "phase": PROGRESS.phase}
        return {**failed, "repeats": fault is False}
    outcome["exit_code"] = EXIT_DONE
    if outcome["status"] == "stopped":
        outcome["exit_code"] = EXIT_SIGINT if stop.signal == signal.SIGINT else EXIT_SIGTERM
    return outcome


def _failed(env: RankEnv, exit_code: int, text: str, fault: bool | None) -> Outcome:
    return {
        **failed_outcome(text, exit_code),
        "rank": env.rank,
        "fault": fault,
        "traceback": traceback.format_exc(),
    }


def _is_fault(error: BaseException) -> bool | None:
    """Return whether resuming from a checkpoint may succeed after this exception of torch or of a
    task's code: True, False if the exception would be raised again, or None if unknown."""
    from torch import distributed

    if is_out_of_memory(error):
        return False
    if isinstance(error, distributed.DistError):
        return True
    if isinstance(error, OSError):  # some are ValueErrors too; the file or link may become usable
        return None
    if isinstance(error, _REPEATABLE) and not isinstance(error, EOFError):
        return False
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if "device-side assert" in text:  # usually an index out of bounds
        return False
    if _LINK_OR_DEVICE_ERROR.search(text):
        return True
    return False if _PROGRAM_ERROR.search(text) else None


def reports_a_link(text: str) -> bool:
    """Return whether an error describes a connection or a device, so that the failure of another
    rank may have caused it."""
    return bool(_LINK_OR_DEVICE_ERROR.search(text))


def _end_with_error(folder: Path, env: RankEnv, error: RunError) -> None:
    write_outcome(folder, env, {**shared_outcome(error), "rank": env.rank, "traceback": ""})
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def describe(error: BaseException, spec: Any = None) -> str:
    """Describe an exception that Paceline did not raise, in one paragraph. ``spec`` is used for
    advice if the rank ran out of memory."""
    kind, text = type(error).__name__, str(error).strip().splitlines()
    first = text[0][:400] if text else "no message"
    if spec is not None and is_out_of_memory(error):
        args = spec.config.train_args
        return (
            f"Out of memory: {first} To fix: lower `per_device_train_batch_size` (now"
            f" {args.per_device_train_batch_size}) and raise `gradient_accumulation_steps` by the"
            f" same factor (the result stays the same), lower `max_length` (now {args.max_length}),"
            " or set `gradient_checkpointing: full`, `precision: bf16-mixed` or `lora.enable:"
            " true`."
        )
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{kind}: {first}{location}. Re-run with --debug for the full traceback."


def write_outcome(folder: Path, env: RankEnv, outcome: Outcome) -> None:
    """Write the outcome of a rank to the launcher's folder."""
    write_atomic(
        outcome_file(folder, env.local_rank),
        json.dumps({**outcome, "rank": env.rank, "time": time.time()}),
    )

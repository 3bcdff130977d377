"""One rank's process: who it obeys, what it leaves behind for the launcher to read."""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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
    PacelineError,
    SaveError,
)
from paceline.core.files import write_atomic
from paceline.core.log import configure_logging, mute_console
from paceline.core.processes import end_with_launcher
from paceline.core.stop import StopFlag
from paceline.distributed.environment import RankEnv, from_environment
from paceline.train.setup import run_rank

STOP_FILE = "stop"

#: How gloo, NCCL and CUDA speak of a peer that is gone, a link that is cut and a device that fails.
_OF_A_LINK_OR_DEVICE = re.compile(
    r"connection (closed|reset|refused)|timed? ?out|broken pipe|socket|NCCL|CUDA error|unhandled"
    r" system error",
    re.IGNORECASE,
)

#: Exceptions of Python that the same code on the same data raises again.
_REPEATABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError,
    NameError, NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip

#: How torch reports shapes, types and indices that do not fit.
_OF_THE_PROGRAM = re.compile(
    r"size mismatch|must match|shapes? .*(cannot|invalid|incompatible|mismatch)|is invalid for"
    r" input of size|"
    r"out of (range|bounds)|expected (scalar type|all tensors|.*(dtype|dimension|size))|not"
    r" implemented for|"
    r"same (dtype|device|shape|size)|does not require grad|inplace operation|backward through the"
    r" graph a second",
    re.IGNORECASE,
)

#: What a rank does: (spec, who it is, whether it shall stop) → {"status": "done" | "stopped",
#: "report": …}. ``spec.config`` is its config.
RunRank = Callable[[Any, RankEnv, StopFlag], Outcome]


def failed_outcome(text: str, exit_code: int = EXIT_FAILED) -> Outcome:
    """Return the outcome of a run or a rank that failed."""
    return {
        "status": "failed",
        "exit_code": exit_code,
        "text": text,
        "traceback": "",
        "report": None,
    }


def outcome_file(folder: Path, local_rank: int) -> Path:
    return folder / f"outcome-{local_rank}.json"


def pid_file(folder: Path, local_rank: int) -> Path:
    return folder / f"pid-{local_rank}"


def worker_main(spec: Any, folder: str, run: RunRank = run_rank) -> None:
    """Entry of a rank that Paceline's own launcher started. ``folder`` is the launcher's, for pids
    and outcomes; ``run`` is what the rank shall do with the spec."""
    here = Path(folder)
    env = from_environment()
    if env.rank == 0:
        configure_logging()
    else:
        mute_console()
    end_with_launcher()
    os.setpgid(0, 0)  # a Ctrl-C in the terminal reaches the launcher alone, which passes it on once
    stop = StopFlag()
    stop.install(sigint=False)
    stop.fail = partial(_end_by_fault, here, env)
    write_atomic(pid_file(here, env.local_rank), str(os.getpid()))
    if (here / STOP_FILE).exists():
        write_outcome(here, env, {"status": "stopped", "report": None})
        return
    outcome = run_guarded(spec, env, stop, run)
    write_outcome(here, env, outcome)
    if outcome["status"] == "failed":
        sys.stdout.flush()
        sys.stderr.flush()
        # at once: the other ranks wait for this one and must see it gone
        os._exit(int(outcome["exit_code"]))


def run_guarded(spec: Any, env: RankEnv, stop: StopFlag, run: RunRank = run_rank) -> Outcome:
    """Run the rank; what happened as a plain dict: status, report, and for a failure exit_code,
    text and traceback."""
    try:
        outcome = run(spec, env, stop)
    except PacelineError as error:
        failed = _failed(env, error.exit_code, error.paragraph(), isinstance(error, FaultError))
        blamed = getattr(error, "ranks", None)
        return {
            **failed,
            "every_rank": isinstance(error, SaveError),
            "of_all": isinstance(error, MismatchError) or blamed is not None,
            "blamed": blamed,
        }
    except BaseException as error:  # the launcher must hear of anything that ends a rank
        fault = _is_fault(error)
        return {
            **_failed(env, EXIT_FAILED, describe(error, spec), fault),
            "repeats": fault is False,
        }
    if outcome["status"] == "stopped":
        outcome["exit_code"] = EXIT_SIGINT if stop.signal == signal.SIGINT else EXIT_SIGTERM
    else:
        outcome["exit_code"] = EXIT_DONE
    return outcome


def _failed(env: RankEnv, exit_code: int, text: str, fault: bool | None) -> Outcome:
    return {
        "status": "failed",
        "rank": env.rank,
        "exit_code": exit_code,
        "text": text,
        "fault": fault,
        "traceback": traceback.format_exc(),
    }


def _is_fault(error: BaseException) -> bool | None:
    """Return True if resuming from a checkpoint may succeed after this exception of torch or of a
    task's code, False if the exception would be raised again, None if that is not known."""
    from torch import OutOfMemoryError, distributed

    if isinstance(error, distributed.DistError):
        return True
    if isinstance(error, OSError):  # some are values errors too, and a file or a link may come back
        return None
    if isinstance(error, (*_REPEATABLE, OutOfMemoryError)) and not isinstance(error, EOFError):
        return False
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if "device-side assert" in text:  # mostly an index beyond a table
        return False
    if _OF_A_LINK_OR_DEVICE.search(text):
        return True
    return False if _OF_THE_PROGRAM.search(text) else None


def reports_a_link(text: str) -> bool:
    """Return whether an error only describes a connection or a device, so that the end of another
    rank may have caused it."""
    return bool(_OF_A_LINK_OR_DEVICE.search(text))


def _end_by_fault(folder: Path, env: RankEnv, text: str, blamed: Sequence[int]) -> None:
    write_outcome(
        folder,
        env,
        {
            **_failed(env, EXIT_FAILED, text, True),
            "traceback": "",
            "of_all": True,
            "blamed": list(blamed),
        },
    )
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def describe(error: BaseException, spec: Any = None) -> str:
    """One paragraph about an exception that is not Paceline's. ``job``: for what to change where
    memory ran out."""
    kind, text = type(error).__name__, str(error).strip().splitlines()
    first = text[0][:400] if text else "no message"
    if spec is not None and (kind == "OutOfMemoryError" or isinstance(error, MemoryError)):
        args = spec.config.train_args
        return (
            f"Out of memory: {first} To fix: lower `per_device_train_batch_size` (now"
            f" {args.per_device_train_batch_size}) and raise `gradient_accumulation_steps` by the"
            f" same factor (the result stays the same), lower `max_length` (now {args.max_length}),"
            " or set `gradient_checkpointing: true`, `precision: bf16-mixed` or `lora.enable:"
            " true`."
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{kind}: {first}{where}. To see the whole traceback: run again with --debug."


def write_outcome(folder: Path, env: RankEnv, outcome: Outcome) -> None:
    write_atomic(
        outcome_file(folder, env.local_rank),
        json.dumps({**outcome, "rank": env.rank, "time": time.time()}),
    )

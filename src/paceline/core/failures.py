"""How ranks end: one record for all launchers, what kind of failure an exception is, and which of
several failures caused the others.

Messages of torch, Gloo and NCCL are recognized only here, because these libraries report most
failures as a RuntimeError.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    ErrorRecord,
    FaultError,
    MismatchError,
    OutOfMemory,
    PacelineError,
    RunError,
    SaveError,
)
from paceline.core.texts import UserText, Values, translatable


class FailureKind(StrEnum):
    """What failed, and so whether a restart from the latest checkpoint may succeed."""

    #: The config, the input or the usage is invalid. The message says what to change.
    USAGE = "usage"
    #: A failure that Paceline explains, and that a restart would repeat.
    EXPLAINED = "explained"
    #: An exception that the same code would raise again on the same data.
    PROGRAM = "program"
    #: Memory could not be allocated. Smaller memory settings may help.
    MEMORY = "memory"
    #: A rank, a device or a link failed. A restart may succeed, also after the next three.
    FAULT = "fault"
    #: A peer closed the connection, probably because it failed before.
    CLOSED = "closed"
    #: A peer did not answer in time, probably because it failed before.
    TIMEOUT = "timeout"
    #: A process ended without a message, or its host was lost.
    KILLED = "killed"
    #: It is unknown whether a restart may succeed.
    UNKNOWN = "unknown"


_TRANSIENT = frozenset({
    FailureKind.FAULT, FailureKind.CLOSED, FailureKind.TIMEOUT, FailureKind.KILLED,
})  # fmt: skip
_CONSEQUENCES = frozenset({FailureKind.CLOSED, FailureKind.TIMEOUT})


class FailureScope(StrEnum):
    """Whom the text of a failure is about."""

    #: One rank, which the text does not name.
    RANK = "rank"
    #: Ranks or a host that ended without a message, which the text names.
    PROCESSES = "processes"
    #: No single rank: each rank fails with the same text.
    EVERY_RANK = "every rank"
    #: Several ranks, as one rank or the watchdog has found out. It precedes their own failures.
    RUN = "run"


@dataclass(frozen=True)
class Failure:
    """A failure of a run.

    Args:
        ranks: ranks that failed first, as far as known.
        hosts: names of the hosts of these ranks; empty on a single host.
        text: the cause, for messages and for the `fault` event.
        code: the kind of error, for ``paceline help`` and other languages.
        values: what the text contains.
    """

    kind: FailureKind
    scope: FailureScope
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str
    code: str = "failed"
    values: Values = field(default_factory=dict)

    @property
    def is_transient(self) -> bool:
        """Whether a restart from the latest checkpoint may succeed."""
        return self.kind in _TRANSIENT

    @property
    def is_permanent(self) -> bool:
        """Whether a restart would fail again. An unknown failure is neither."""
        return not self.is_transient and self.kind is not FailureKind.UNKNOWN

    @property
    def is_consequence(self) -> bool:
        """Whether the failure only reports that a peer no longer answers."""
        return self.kind in _CONSEQUENCES and self.scope is not FailureScope.RUN

    def record(self, message: str) -> ErrorRecord:
        """Return the failure as the record of an error with a message of one paragraph."""
        values = dict(self.values)
        return {"code": self.code, "what": message, "allowed": None, "fix": None, "values": values}

    @property
    def reason(self) -> str:
        """The cause, to be continued as a sentence."""
        return self.text.rstrip(".")


class ReportedError(RunError):
    """A failure that a rank has already described in one paragraph, with the exit code of its
    process.

    Args:
        text: the paragraph.
        exit_code: the exit code of the command.
        failure: the failure of that rank, if it is known.
    """

    def __init__(
        self, text: str, exit_code: int = EXIT_FAILED, failure: Failure | None = None
    ) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.failure = failure
        if failure is not None:
            self.code, self.values = failure.code, dict(failure.values)

    def paragraph(self) -> str:
        return self.what


@dataclass(frozen=True)
class ExitRecord:
    """How a rank or a run ended.

    Args:
        status: "done", "stopped", "failed", or "finished" if the run was already complete.
        report: the result, on ranks that have one: a :class:`~paceline.core.report.Report`, or
            what another command measures.
        failure: the failure if the status is "failed", otherwise None.
        message: message for the user, one paragraph. It contains the failure's text.
        phase: what the rank did when memory was lacking.
        is_final: whether no restart follows.
        time: when it ended, in seconds since the epoch; None if unknown.
    """

    status: str
    exit_code: int = EXIT_DONE
    report: Any = None
    failure: Failure | None = None
    message: str = ""
    traceback: str = ""
    phase: str = ""
    is_final: bool = False
    time: float | None = None

    @property
    def cause(self) -> Failure:
        """The failure of a record with the status "failed"."""
        assert self.failure is not None
        return self.failure

    @classmethod
    def failed(cls, failure: Failure, message: str | None = None, **fields: Any) -> ExitRecord:
        """Return the record of a failure. By default the message is the failure's text."""
        exit_code = EXIT_USAGE if failure.kind is FailureKind.USAGE else EXIT_FAILED
        message = failure.text if message is None else message
        return cls("failed", exit_code, failure=failure, message=message, **fields)

    @classmethod
    def of_run(cls, text: str, kind: FailureKind = FailureKind.UNKNOWN) -> ExitRecord:
        """Return the record of a failure of no single rank."""
        return cls.failed(
            Failure(kind, FailureScope.EVERY_RANK, (), (), text, **translatable(text))
        )

    @classmethod
    def killed(
        cls, ranks: Iterable[int], hosts: Iterable[str], reason: str, time: float | None = None
    ) -> ExitRecord:
        """Return the record of ranks that left none.

        Args:
            reason: text that names the ranks and says how they ended.
        """
        scope = FailureScope.PROCESSES
        kind, of_text = FailureKind.KILLED, translatable(reason)
        failure = Failure(kind, scope, tuple(ranks), tuple(hosts), reason, **of_text)
        return cls.failed(failure, f"{reason}. The other ranks were stopped.", time=time)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ExitRecord:
        """Return the record that :meth:`as_json` has converted."""
        failure = record["failure"]
        if failure is not None:
            failure = Failure(
                FailureKind(failure["kind"]),
                FailureScope(failure["scope"]),
                tuple(failure["ranks"]),
                tuple(failure["hosts"]),
                failure["text"],
                failure["code"],
                failure["values"],
            )
        return cls(**{**record, "failure": failure})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def named(self, place: str) -> ExitRecord:
        """Return the record with the failed rank in its texts, if they do not say it.

        Args:
            place: name of the rank, such as "rank 1 on host b".
        """
        failure = self.failure
        if failure is None or failure.scope is not FailureScope.RANK:
            return self
        message = f"{place} failed. {self.message}"
        text = message if self.message == failure.text else failure.text
        return replace(self, message=message, failure=replace(failure, text=text))


def first_cause(failures: Iterable[ExitRecord]) -> ExitRecord | None:
    """Return the failure that caused the others; None if there are none.

    A report that a peer no longer answers is a consequence. A failure that describes several ranks
    precedes their own failures. Then follow failures of unknown time, because a killed process
    cannot record it, and then the earliest one.
    """
    return min(failures, key=_precedence, default=None)


def _precedence(record: ExitRecord) -> tuple[bool, bool, bool, float]:
    return (
        record.cause.is_consequence,
        record.cause.scope is not FailureScope.RUN,
        record.time is not None,
        record.time or 0.0,
    )


# -- exceptions
#: Messages with which Gloo, NCCL and torch's stores report that a peer has exited.
_PEER_CLOSED = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|remote process exited"
    r"|DistNetworkError|failed to recv|store.*(closed|unreachable)|NCCL communicator was aborted"
    r"|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
#: Messages with which Gloo, NCCL (RCCL, oneCCL) and CUDA (HIP, SYCL) report a broken link or a
#: failed device.
_LINK_OR_DEVICE = re.compile(
    r"socket|NCCL|oneCCL|(CUDA|HIP) error|UR_RESULT_ERROR_DEVICE_LOST|unhandled system error",
    re.IGNORECASE,
)
#: Messages with which torch reports incompatible shapes, dtypes and indices.
_PROGRAM = re.compile(
    r"size mismatch|must match|shapes? .*(cannot|invalid|incompatible|mismatch)|is invalid for"
    r" input of size|out of (range|bounds)|expected (scalar type|all tensors|.*(dtype|dimension"
    r"|size))|not implemented for|same (dtype|device|shape|size)|does not require grad|inplace"
    r" operation|backward through the graph a second",
    re.IGNORECASE,
)
#: Messages of the CPU's allocator, of CUDA and NCCL beside the caching allocator, and of CUDA's
#: libraries when they create a handle.
_NO_MEMORY = re.compile(
    r"can't allocate memory|out of memory|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
#: The size in the messages of CUDA's caching allocator ("Tried to allocate 2.50 GiB") and of the
#: CPU's ("you tried to allocate 4096 bytes").
_REQUESTED = re.compile(r"allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Python exceptions that the same code would raise again on the same data.
_REPEATABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def classify(error: BaseException, rank: int | None = None) -> Failure:
    """Return the failure that an exception stands for.

    Args:
        rank: the rank that raised it.
    """
    if isinstance(error, ReportedError) and error.failure is not None:
        return error.failure
    ranks: tuple[int, ...] = () if rank is None else (rank,)
    if not isinstance(error, PacelineError):
        text = describe_error(error)
        kind, of_text = _kind_of_foreign(error), translatable(text)
        return Failure(kind, FailureScope.RANK, ranks, (), text, **of_text)
    scope = _scope_of(error)
    if isinstance(error, FaultError):
        ranks = tuple(error.ranks or ranks)
    text = error.paragraph()
    return Failure(_kind_of_own(error), scope, ranks, (), text, error.code, error.values)


def classify_of_run(error: PacelineError, rank: int | None = None) -> Failure:
    """Return the failure of an error with which all ranks end, whichever of them raises it."""
    return replace(classify(error, rank), scope=FailureScope.RUN)


def _scope_of(error: PacelineError) -> FailureScope:
    if isinstance(error, MismatchError) or getattr(error, "ranks", None) is not None:
        return FailureScope.RUN
    if isinstance(error, SaveError) or error.exit_code == EXIT_USAGE:
        return FailureScope.EVERY_RANK
    return FailureScope.RANK


def _kind_of_own(error: PacelineError) -> FailureKind:
    if error.exit_code == EXIT_USAGE:
        return FailureKind.USAGE
    if isinstance(error, OutOfMemory):
        return FailureKind.MEMORY
    if isinstance(error, FaultError):
        return _kind_of_link(error.paragraph()) or FailureKind.FAULT
    return FailureKind.UNKNOWN if isinstance(error, ReportedError) else FailureKind.EXPLAINED


def _kind_of_foreign(error: BaseException) -> FailureKind:
    """Return the kind of an exception of torch or of a task's code."""
    if is_out_of_memory(error):
        return FailureKind.MEMORY
    text = f"{type(error).__name__}: {error}"
    if _is_of_type(error, "torch.distributed", "DistError"):
        return _kind_of_link(text) or FailureKind.FAULT
    if isinstance(error, OSError):  # some are ValueErrors too; the file or link may become usable
        return FailureKind.UNKNOWN
    if isinstance(error, _REPEATABLE):
        return FailureKind.PROGRAM
    if not isinstance(error, RuntimeError):
        return FailureKind.UNKNOWN
    if "device-side assert" in text:  # usually an index out of bounds
        return FailureKind.PROGRAM
    kind = _kind_of_link(text)
    if kind is not None:
        return kind
    return FailureKind.PROGRAM if _PROGRAM.search(text) else FailureKind.UNKNOWN


def _kind_of_link(text: str) -> FailureKind | None:
    """Return the kind of a failure of a link or of a device; None for other failures."""
    if _PEER_CLOSED.search(text):
        return FailureKind.CLOSED
    if _TIMED_OUT.search(text):
        return FailureKind.TIMEOUT
    return FailureKind.FAULT if _LINK_OR_DEVICE.search(text) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on an accelerator or on the host."""
    if isinstance(error, MemoryError) or _is_of_type(error, "torch", "OutOfMemoryError"):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def requested_size(message: str) -> int:
    """Return the bytes that an allocator's error message names; 0 if it names none."""
    match = _REQUESTED.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def describe_error(error: BaseException) -> str:
    """Describe an exception that Paceline did not raise, in one paragraph."""
    text = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return UserText(
        "{kind}: {reason}{location}. Re-run with --debug for the full traceback.",
        code="exception",
        kind=type(error).__name__,
        reason=text[0][:400] if text else "no message",
        location=location,
    )


def _is_of_type(error: BaseException, module: str, name: str) -> bool:
    """Return whether ``error`` is of a type of torch, which ``core`` does not import. If torch is
    not imported, none of its exceptions can be raised."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(error, kind)

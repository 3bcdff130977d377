"""A case of the GPU benchmark, and its result: one line of the results."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "timeout", "skipped"]


class Skipped(Exception):
    """Raised by a case that cannot run on this machine. The text is the reason."""


@dataclass(frozen=True)
class Case:
    """A function that one process, or one process per rank, calls.

    Args:
        function: name of the function, as ``sections.losses:compare``. It is called as
            ``function(context, **arguments)``, see :class:`context.Context`, and returns figures.
        num_ranks: number of processes that call the function at the same time.
        limit_s: time after which the case is ended.
        is_timing: whether the case measures speed. It then runs alone, and its failure does not
            make the benchmark fail.
        why_skipped: reason for which the case is not run at all; empty if the case is run.
    """

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    limit_s: float = 60.0
    is_timing: bool = False
    why_skipped: str = ""


@dataclass(frozen=True)
class Section:
    """Cases with a limit on the time from the start of the first case."""

    name: str
    limit_s: float
    cases: list[Case]


@dataclass(frozen=True)
class Result:
    """The outcome of a case.

    Args:
        card: name of the device.
        figures: measured values; empty unless the case is ``ok``.
        reason: why the case is not ``ok``.
    """

    section: str
    name: str
    status: Status
    seconds: float
    card: str
    figures: dict[str, Any]
    reason: str
    is_timing: bool

    @property
    def line(self) -> dict[str, Any]:
        """The object in ``results.jsonl``."""
        return {key: value for key, value in asdict(self).items() if key != "is_timing"}

    @property
    def makes_run_fail(self) -> bool:
        return not self.is_timing and self.status in ("failed", "timeout")

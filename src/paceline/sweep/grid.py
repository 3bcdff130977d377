"""The runs of a grid: every combination once."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sweep.state import SweepRun

#: States in which a run is not made again.
_FINAL = ("done", "pruned")


class Grid:
    """Runs the combinations in their order. Those that are done are left out, and those that failed
    or were stopped continue from their latest checkpoint."""

    needs_values = False

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        self.num_runs = len(runs)
        self._remaining = [
            (number, run) for number, run in enumerate(runs, 1) if run["status"] not in _FINAL
        ]
        self._number = 0

    def next_run(self) -> SweepRun | None:
        if not self._remaining:
            return None
        self._number, run = self._remaining.pop(0)
        return run

    def observe(self, run: SweepRun, step: int, value: float) -> bool:
        return False

    def finish(self, run: SweepRun) -> None:
        """Nothing depends on the result of a run."""

    def progress(self) -> str:
        return f"run {self._number} of {self.num_runs}"

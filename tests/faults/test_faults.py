"""A chosen few of the laboratory's faults; all of them, many times over: test_soak.py. Kills of
single ranks, of the launcher, and signals: tests/launch/test_restart.py; hosts: tests/cluster."""

from pathlib import Path

import pytest
from commands import events
from lab import MODES, SMALL, drive, task_words

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.mark.soak
def test_kills_in_a_row_of_what_is_compressed(tmp_path: Path) -> None:
    """Of rank 0 and of the fork server; what waits to be sent comes back too."""
    args = (*SMALL, *MODES["ddp, topk"], "max_steps=100")
    undisturbed = drive(tmp_path / "undisturbed", args, [], seed=0)
    faults = ["kill -9 of the fork server", "kill -9 of rank 0"]
    result = drive(tmp_path / "run", args, faults, seed=1)
    assert result.tried.total() == len(faults)
    assert (result.digest, result.left) == (undisturbed.digest, [])


@pytest.mark.soak
def test_a_rank_that_stands_still_for_good_is_replaced(tmp_path: Path) -> None:
    args = task_words(tmp_path, "lab_task.py", num_ranks=2, base_s=0.02)
    args += ["recovery.hang_warning_s=2", "recovery.hang_timeout_s=4"]
    undisturbed = drive(tmp_path / "undisturbed", args, [], seed=0)
    result = drive(
        tmp_path / "run", args, ["SIGSTOP of a rank, 2 s", "SIGSTOP of a rank, for good"], seed=1
    )
    (fault,) = events(tmp_path / "run", "fault")
    assert "SIGSTOP" in fault["reason"]
    assert (result.digest, result.left, result.starts) == (undisturbed.digest, [], 2)

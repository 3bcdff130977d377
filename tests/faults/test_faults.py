"""Inject a few of the faults; test_soak.py injects all of them repeatedly.

tests/launch/test_restart.py has kills of single ranks and of the launcher, and signals;
tests/cluster has faults of hosts.
"""

from pathlib import Path

import pytest
from commands import events
from lab import MODES, SMALL, make_task_args, run_with_faults

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.mark.soak
def test_consecutive_kills_with_compression(tmp_path: Path) -> None:
    """Kill rank 0 and the fork server. The unsent gradients (error feedback) are restored too."""
    args = (*SMALL, *MODES["ddp, topk"], "max_steps=100")
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    faults = ["kill -9 of the fork server", "kill -9 of rank 0"]
    result = run_with_faults(tmp_path / "run", args, faults, seed=1)
    assert result.injected.total() == len(faults)
    assert (result.digest, result.leftovers) == (reference.digest, [])


@pytest.mark.soak
def test_stopped_rank_is_restarted(tmp_path: Path) -> None:
    args = make_task_args(tmp_path, "lab_task.py", num_ranks=2, base_s=0.02)
    args += ["recovery.hang_warning_s=2", "recovery.hang_timeout_s=4"]
    reference = run_with_faults(tmp_path / "reference", args, [], seed=0)
    result = run_with_faults(
        tmp_path / "run", args, ["SIGSTOP of a rank, 2 s", "SIGSTOP of a rank, for good"], seed=1
    )
    (fault,) = events(tmp_path / "run", "fault")
    assert "SIGSTOP" in fault["reason"]
    assert (result.digest, result.leftovers, result.starts) == (reference.digest, [], 2)

"""Test runs whose terminal or output pipe is closed, and output without a terminal."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from commands import MICRO, report, start, train, wait_for_step

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_sighup_saves_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(*MICRO, f"output_dir={folder}", "max_steps=400", start_new_session=True)
    wait_for_step(folder, 2, process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    # The kernel signals the whole process group, and then the shell signals it again.
    os.killpg(process.pid, signal.SIGHUP)
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert psutil.wait_procs(descendants, timeout=6)[1] == []
    result = report(folder)
    assert result["status"] == "stopped"
    assert (folder / "checkpoints" / f"step-{result['steps']:08d}").is_dir()


@pytest.mark.soak
@pytest.mark.parametrize("lines", [0, 8])
def test_closed_output_pipe_does_not_stop_run(tmp_path: Path, lines: int) -> None:
    folder = tmp_path / "run"
    process = start(*MICRO, f"output_dir={folder}", "max_steps=3", "parallel.num_gpus=1")
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(lines):
        process.stderr.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=90) == 0
    assert report(folder)["status"] == "done"


@pytest.mark.soak
def test_plain_output_without_terminal(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "max_steps=3", "parallel.num_gpus=1", "--json")
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert "step 3/3" in done.stderr  # --json does not change the log on standard error
    assert done.stdout.startswith("{")

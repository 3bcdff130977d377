"""Test runs whose disk fills up: training continues, the last valid checkpoint remains, and the
error states the path and the number of bytes."""

import errno
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import MICRO, events, report, start, train
from disks import mount_tmpfs

from paceline.checkpoint import store

pytestmark = pytest.mark.slow

# A full checkpoint of the micro model has about 7 MiB.
ARGS = ("max_steps=12", "save_steps=3", "parallel.num_gpus=1")


def fill(ballast: Path, leave_bytes: int) -> None:
    """Grow ``ballast`` until no more than ``leave_bytes`` are free, while the run writes and
    removes files."""
    with open(ballast, "ab", buffering=0) as handle:
        while (free := shutil.disk_usage(ballast.parent).free) > leave_bytes:
            try:
                handle.write(bytes(min(free - leave_bytes, 1 << 20)))
            except OSError as error:  # the run used the space first, and may free it again
                if error.errno != errno.ENOSPC:
                    raise


@pytest.mark.soak
def test_failed_saves_keep_last_checkpoint_and_fail_the_run(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=12m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "run"
        args = (*ARGS, "async_save=false")
        failed = train(folder, *args, expect=1)  # only the first save fits
        latest, invalid = store.latest_valid(folder / "checkpoints")
        assert latest == folder / "checkpoints" / "step-00000003"
        assert invalid == []
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
        saves = [
            (event["step"], bool(event.get("error"))) for event in events(folder, "checkpoint")
        ]
        assert saves == [(3, False), (6, True), (9, True), (12, True)]
        assert events(folder, "step")[-1]["step"] == 12  # training continued
        error = failed.stderr
        for step in (6, 9):
            assert (
                f"checkpoint of step {step} could not be written to"
                f" {folder}/checkpoints/step-{step:08d}" in error
            )
        error = error[error.rindex("\nerror: ") :].strip()
        assert "\n" not in error
        for part in (
            f"{folder}/checkpoints/step-00000012",
            "No space left",
            " bytes",
            "free:",
            "earlier checkpoints are untouched",
        ):
            assert part in error
        assert events(folder, "run_end")[-1]["status"] == "failed"

        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "small")], check=True)
        resumed = train(folder, *args)  # with more space, the same command resumes
        assert "resuming from step 3 of 12" in resumed.stderr
        assert report(folder)["status"] == "done"
        assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.soak
def test_save_error_is_not_attributed_to_other_rank(
    tmp_path: Path,
) -> None:
    with mount_tmpfs(tmp_path / "small", "size=4m") as mounted:
        if not mounted:
            return
        failed = train(
            tmp_path / "small" / "run",
            "max_steps=2",
            "save_steps=0",
            "parallel.num_gpus=2",
            expect=1,
        )
        error = failed.stderr[failed.stderr.rindex("\nerror: ") :].strip()
        assert error.startswith("error: the checkpoint of step 2 could not be written")
        assert "No space left" in error


@pytest.mark.soak
def test_run_survives_temporarily_full_disk(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=48m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "run"
        process = start(
            *MICRO,
            f"output_dir={folder}",
            "max_steps=80",
            "save_steps=2",
            "parallel.num_gpus=1",
            "save_total_limit=1",
        )
        try:
            wait_for_checkpoint(folder, process, failed=False)
            # Fill the disk until a save fails, because removing old checkpoints frees space again.
            ballast = folder / "ballast"
            wait_for_checkpoint(
                folder,
                process,
                failed=True,
                while_waiting=lambda: fill(ballast, leave_bytes=300_000),
            )
            assert store.latest_valid(folder / "checkpoints")[0] is not None
            ballast.unlink()
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, err
        assert "No space left" in err
        assert report(folder)["status"] == "done"
        assert store.find(folder).name == "step-00000080"


@pytest.mark.soak
def test_on_save_error_pause_waits_for_free_space(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=12m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "run"
        args = (*MICRO, f"output_dir={folder}", *ARGS, "recovery.on_save_error=pause")
        process = start(*args)
        try:
            wait_for_notice(folder, process, "training is paused at step")
            stopped_at = events(folder, "step")[-1]["step"]
            assert 6 <= stopped_at < 12  # only the first save fits
            # A signal during the pause makes the run try to save once more, and then fail.
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=120)
            assert process.returncode == 1
            assert "No space left" in err
            assert "earlier checkpoints are untouched" in err
            assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]

            process = start(*args)
            wait_for_notice(folder, process, "training is paused at step", 2)
            subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "small")], check=True)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, err
        assert err.count("training is paused at step") == 1
        assert "missing: " in err
        assert "training continues after a pause of" in err
        assert report(folder)["status"] == "done"
        assert report(folder)["resumed_from_step"] == 3


def wait_for_notice(
    folder: Path, process: subprocess.Popen[str], text: str, times: int = 1
) -> None:
    """Wait until the event log has this many notices that contain ``text``."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if (folder / "events.jsonl").exists() and sum(
            text in event["text"] for event in events(folder, "notice")
        ) >= times:
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} was not reported")


def wait_for_checkpoint(
    folder: Path,
    process: subprocess.Popen[str],
    failed: bool,
    while_waiting: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the event of a successful or failed save; call ``while_waiting`` repeatedly."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        while_waiting()
        if (folder / "events.jsonl").exists() and any(
            bool(event.get("error")) == failed for event in events(folder, "checkpoint")
        ):
            return
        time.sleep(0.02)
    raise AssertionError("no such checkpoint event was logged")


@pytest.mark.soak
def test_disk_full_when_writing_model(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=9m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "run"
        failed = train(folder, "max_steps=3", "save_steps=0", "parallel.num_gpus=1", expect=1)
        error = failed.stderr[failed.stderr.rindex("\nerror: ") :].strip()
        assert "\n" not in error
        assert f"the trained model could not be written to {folder}/model" in error
        assert store.find(folder).name == "step-00000003"
        assert not (folder / "model").exists()
        assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []

"""Test that temporary folders of killed processes are removed and those in use are kept."""

import contextlib
import os
import signal
import socket
import tempfile

import pytest

from paceline.core.files import Scratch


@pytest.fixture(autouse=True)
def temporary_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave_stale_folder(prefix):
    """Kill a process that has a temporary folder."""
    child = os.fork()
    if child == 0:
        scratch = Scratch(prefix)
        (scratch.path / "subfolder").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def keeps_its_folders() -> bool:
    with contextlib.suppress(OSError):
        for _ in range(50):
            with Scratch("used-") as path:
                (path / "a").touch(exist_ok=False)
                (path / "a").unlink()
        return True
    return False


def test_folder_is_removed_at_the_end_of_the_block(temporary_dir):
    with Scratch() as path:
        assert path.parent == temporary_dir
        (path / "a").write_text("a")
    assert list(temporary_dir.iterdir()) == []


def test_removes_stale_folders_and_keeps_used_ones(temporary_dir):
    used = Scratch("used-")
    (temporary_dir / "used-by-another-program").mkdir()
    leave_stale_folder("used-")
    assert len(list(temporary_dir.iterdir())) == 3
    with Scratch("other-"):
        assert len(list(temporary_dir.iterdir())) == 4
    with Scratch("used-") as path:
        assert set(temporary_dir.iterdir()) == {
            used.path,
            path,
            temporary_dir / "used-by-another-program",
        }
    used.close()


def test_removes_what_orphans_wrote_after_the_removal(temporary_dir):
    """A rank that outlives its launcher for a moment writes into a folder that is being removed."""
    leave_stale_folder("used-")
    (stale,) = temporary_dir.iterdir()
    with Scratch("used-"):
        stale.mkdir()  # as after a removal that failed, or was interrupted by a kill
        (stale / "rank-0.start.json").touch()
    assert list(temporary_dir.iterdir()) == []


def test_processes_that_start_together_keep_their_folders(temporary_dir):
    """A folder is unlocked for a moment after its creation; another process may remove it then."""
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            os._exit(not keeps_its_folders())
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert list(temporary_dir.iterdir()) == []


def test_keeps_folders_of_other_hosts(temporary_dir, monkeypatch):
    leave_stale_folder("used-")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    with Scratch("used-"):
        assert len(list(temporary_dir.iterdir())) == 2

"""Test that temporary folders of killed processes are removed and those in use are kept."""

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


def test_keeps_folders_of_other_hosts(temporary_dir, monkeypatch):
    leave_stale_folder("used-")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    with Scratch("used-"):
        assert len(list(temporary_dir.iterdir())) == 2

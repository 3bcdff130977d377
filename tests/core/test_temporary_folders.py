"""Temporary folders of a killed process are removed by the next one; those in use stay."""

import os
import signal
import tempfile

import pytest

from paceline.core.files import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(prefix):
    """A process that is killed while it has a folder."""
    child = os.fork()
    if child == 0:
        scratch = Scratch(prefix)
        (scratch.path / "more").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_it_goes_with_its_with(temporary):
    with Scratch() as path:
        assert path.parent == temporary
        (path / "a").write_text("a")
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(temporary):
    used = Scratch("used-")
    (temporary / "used-of-somebody-else").mkdir()
    killed("used-")
    assert len(list(temporary.iterdir())) == 3
    with Scratch("other-"):
        assert len(list(temporary.iterdir())) == 4
    with Scratch("used-") as path:
        assert set(temporary.iterdir()) == {used.path, path, temporary / "used-of-somebody-else"}
    used.close()

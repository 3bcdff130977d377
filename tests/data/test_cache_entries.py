"""Test the list of the cache's entries, and that pruning keeps entries that a process uses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run

from paceline.core.files import cache_dir
from paceline.data.cache import build_once
from paceline.data.cache_entries import delete_entry, list_entries, note_use, select_prunable

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_entry(kind: str, name: str, size_bytes: int, age_days: float) -> Path:
    path = cache_dir() / kind / name
    path.mkdir(parents=True)
    (path / "data").write_bytes(bytes(size_bytes))
    at = time.time() - age_days * DAY_S
    os.utime(path, (at, at))
    return path


#: Uses an entry, says so, and ends when its standard input is closed.
USER = """
import sys
from paceline.core.files import cache_dir
from paceline.data.cache_entries import note_use
note_use(cache_dir() / "tokens" / sys.argv[1] / "part")
print("ready", flush=True)
sys.stdin.read()
"""


def start_user(name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, name], stdin=-1, stdout=-1, text=True, env=os.environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_entries_are_listed_by_the_time_of_their_last_use() -> None:
    make_entry("tokens", "a", 10, age_days=1)
    make_entry("models", "b", 20, age_days=40)
    make_entry("locks", "c", 30, age_days=40)  # not an entry
    entries = list_entries()
    assert [(entry.kind, entry.path.name, entry.size_bytes) for entry in entries] == [
        ("models", "b", 20),
        ("tokens", "a", 10),
    ]


def test_limits_select_the_least_recently_used_entries() -> None:
    for number in range(4):
        make_entry("tokens", f"entry-{number}", 100, age_days=10 * (4 - number))
    entries = list_entries()

    def select(max_age_s: float | None, max_bytes: int | None) -> list[str]:
        return [entry.path.name for entry in select_prunable(entries, max_age_s, max_bytes)]

    assert select(25 * DAY_S, None) == ["entry-0", "entry-1"]
    assert select(None, 150) == ["entry-0", "entry-1", "entry-2"]
    assert select(35 * DAY_S, 250) == ["entry-0", "entry-1"]
    assert select(None, 400) == []


def test_use_makes_an_entry_recent() -> None:
    entry = make_entry("tokens", "a", 10, age_days=40)
    build_once(entry, "data", lambda staging: pytest.fail("it exists"))
    [listed] = list_entries()
    assert listed.is_used
    assert time.time() - listed.used_at < DAY_S


def test_entry_of_a_living_process_is_kept() -> None:
    make_entry("tokens", "used", 10, age_days=40)
    unused = make_entry("tokens", "unused", 10, age_days=40)
    user = start_user("used")
    os.utime(cache_dir() / "tokens" / "used", (0, 0))
    entries = list_entries()
    assert {entry.path.name: entry.is_used for entry in entries} == {"used": True, "unused": False}
    assert [entry.path for entry in select_prunable(entries, DAY_S, 0)] == [unused]
    user.communicate()
    entries = list_entries()
    assert not any(entry.is_used for entry in entries)
    assert len(select_prunable(entries, DAY_S, 0)) == 2


def test_entry_that_gets_used_meanwhile_is_not_deleted() -> None:
    path = make_entry("tokens", "a", 10, age_days=40)
    [entry] = list_entries()
    user = start_user("a")
    assert not delete_entry(entry)
    assert (path / "data").exists()
    user.communicate()
    assert delete_entry(entry)
    assert list_entries() == []


def test_read_only_cache_is_used_without_a_lease(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")  # no folder can be made in it
    note_use(cache_dir() / "tokens" / "a")
    assert list_entries() == []


def test_command_lists_and_prunes() -> None:
    old = make_entry("tokens", "old", 3 << 20, age_days=40)
    recent = make_entry("models", "recent", 1 << 20, age_days=1)
    listed = run("cache", verb="data").stdout
    assert "tokens" in listed
    assert "3.0 MiB" in listed
    assert "2 entries, 4.0 MiB" in listed
    shown = run("cache", "--older-than", "30d", verb="data").stdout
    assert "`--prune` would delete 1 entry, 3.0 MiB" in shown
    assert old.exists()
    result = run("cache", "--prune", "--older-than", "30d", "--json", verb="data")
    pruned = {each["path"]: each["is_pruned"] for each in json.loads(result.stdout)["entries"]}
    assert pruned == {str(old): True, str(recent): False}
    assert not old.exists()
    assert recent.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prune",), "`--prune` needs a limit"),
        (("--older-than", "30"), "is not a number and a unit"),
        (("--max-size", "5 apples"), "is not a number and a unit"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], message: str) -> None:
    old = make_entry("tokens", "old", 10, age_days=400)
    assert message in run("cache", *args, verb="data", expect=2).stderr
    assert old.exists()

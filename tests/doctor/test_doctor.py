"""`paceline doctor` as a user gives it."""

import json
import os
from pathlib import Path

import pytest
from commands import run


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A cache of its own: what is measured here is not for the other tests to plan with."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_command_measures_and_keeps(tmp_path: Path, env: dict[str, str]) -> None:
    words = (
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#50",
        f"output_dir={tmp_path / 'run'}",
    )
    done = run(
        *words, "parallel.device=cpu", "parallel.num_gpus=2", "--json", verb="doctor", env=env
    )
    found = json.loads(done.stdout)
    assert found["ok"]
    names = [one["name"] for one in found["checks"]]
    assert len(names) == len(set(names))
    assert {
        "packages",
        "memory",
        "threads",
        "shared_memory",
        "open_files",
        "disk",
        "port",
        "links",
        "all_reduce",
    } <= set(names)
    for one in found["checks"]:
        assert {"name", "ok", "value", "advice"} <= one.keys()
        assert one["ok"] == (one["advice"] is None)
    (link,) = found["links"]
    assert (link["from"], link["to"], link["intact"]) == (0, 1, True)
    assert link["latency_s"] > 0
    assert link["bandwidth_bytes_s"] > 0
    kept = json.loads((tmp_path / "cache" / "paceline" / "machine.json").read_text())
    assert kept["num_ranks"] == 2
    assert not (tmp_path / "run").exists()


def test_what_would_fail_is_exit_code_1(env: dict[str, str]) -> None:
    done = run(
        "--ranks", "1", verb="doctor", expect=1, env={**env, "GLOO_SOCKET_IFNAME": "nosuch7"}
    )
    assert "FAIL  interface" in done.stdout
    assert "a run would fail: interface" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0"), "1 to 64"),
        (("--ranks", "two"), "1 to 64"),
        (("--ranks", "3", "parallel.num_gpus=2"), "leave one of them out"),
        (("nosuch.yaml",), "nosuch.yaml"),
        (("--rank", "3"), "rank"),
        (("modell=x",), "modell"),
    ],
)
def test_wrong_words(words: tuple[str, ...], said: str) -> None:
    done = run(*words, verb="doctor", expect=2)
    assert said in done.stderr
    assert done.stdout == ""

"""Test `paceline doctor` on the command line."""

import json
import os
from pathlib import Path

import pytest
from commands import run

from paceline.core.files import cache_dir
from paceline.models.builtin import resolve_model


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a separate cache, so that other tests do not plan with these
    measurements. It shares the built-in models and datasets."""
    resolve_model("builtin:qwen2-micro")
    cache = tmp_path / "cache" / "paceline"
    cache.mkdir(parents=True)
    for shared in (cache_dir() / name for name in ("models", "builtin")):
        (cache / shared.name).symlink_to(shared)
    return {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}


def test_doctor_measures_and_saves_the_profile(tmp_path: Path, env: dict[str, str]) -> None:
    done = run(
        "model=builtin:qwen2-micro",
        "dataset=builtin:python-docs#50",
        f"output_dir={tmp_path / 'run'}",
        "parallel.device=cpu",
        "parallel.num_gpus=2",
        "--json",
        verb="doctor",
        env=env,
    )
    result = json.loads(done.stdout)
    assert result["ok"]
    names = [check["name"] for check in result["checks"]]
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
    for check in result["checks"]:
        assert {"name", "ok", "value", "advice"} <= check.keys()
        assert check["ok"] == (check["advice"] is None)
    (link,) = result["links"]
    assert (link["from"], link["to"], link["intact"]) == (0, 1, True)
    assert link["latency_s"] > 0
    assert link["bandwidth_bytes_s"] > 0
    profile = json.loads((tmp_path / "cache" / "paceline" / "machine.json").read_text())
    assert profile["link"]["num_ranks"] == 2
    assert [rates["num_ranks"] for rates in profile["rates"]] == [1, 2]
    assert not (tmp_path / "run").exists()


def test_fatal_problem_exits_with_1(env: dict[str, str]) -> None:
    done = run(
        "--ranks", "1", verb="doctor", expect=1, env={**env, "GLOO_SOCKET_IFNAME": "nosuch7"}
    )
    assert "FAIL  interface" in done.stdout
    assert "a run would fail: interface" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ranks", "0"), "1 to 64"),
        (("--ranks", "two"), "1 to 64"),
        (("--ranks", "3", "parallel.num_gpus=2"), "remove one of them"),
        (("nosuch.yaml",), "nosuch.yaml"),
        (("--rank", "3"), "rank"),
        (("modell=x",), "modell"),
    ],
)
def test_rejects_invalid_arguments(args: tuple[str, ...], message: str) -> None:
    done = run(*args, verb="doctor", expect=2)
    assert message in done.stderr
    assert done.stdout == ""

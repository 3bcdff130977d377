"""Test that an unreachable hub is detected within seconds and reported in one message."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import hub


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (
        "HF_ENDPOINT",
        *hub.OFFLINE_VARIABLES,
        *(f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")),
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub.unreachable.cache_clear()
    yield
    hub.unreachable.cache_clear()


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_reachable_mirror(monkeypatch: pytest.MonkeyPatch, open_port: int) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{open_port}/")
    assert hub.endpoint() == f"http://127.0.0.1:{open_port}"
    assert hub.unreachable() is None


def test_mirror_that_refuses_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    assert (
        hub.unreachable()
        == f"http://127.0.0.1:{port} cannot be reached from this machine (Connection refused)"
    )


def test_mirror_without_a_url_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hf-mirror.com")
    assert "expected HF_ENDPOINT to be a URL" in str(hub.unreachable())


def test_checks_the_proxy_instead_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, open_port: int
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{open_port}")
    assert hub.unreachable() is None
    hub.unreachable.cache_clear()
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    assert "the proxy 127.0.0.1 cannot be reached" in str(hub.unreachable())


@pytest.mark.parametrize("name", hub.OFFLINE_VARIABLES)
def test_offline_mode_is_reported(
    monkeypatch: pytest.MonkeyPatch, open_port: int, name: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{open_port}")
    monkeypatch.setenv(name, "1")
    assert hub.unreachable() == f"offline mode is on ({name}=1)"


def test_recognizes_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub.is_hub_id("Qwen/Qwen2.5-0.5B")
    assert not any(
        map(hub.is_hub_id, ("org/model", "./x", "/a/b", "~/x", "builtin:qwen2-tiny", "a/b/c"))
    )


_MODEL, _DATASET = (
    ("model=a/b", "dataset=d.jsonl"),
    ("model=builtin:qwen2-micro", "dataset=a/b#10"),
)


@pytest.mark.parametrize(
    ("args", "mode"),
    [
        (_MODEL, "report_to=none"),
        (_DATASET, "--dry-run"),
        pytest.param(_MODEL, "--dry-run", marks=pytest.mark.soak),
        pytest.param(_DATASET, "report_to=none", marks=pytest.mark.soak),
    ],
)
def test_hub_id_without_network_is_one_error(
    tmp_path: Path, args: tuple[str, ...], mode: str
) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HOME": str(tmp_path / "hub"),
    }
    environment["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    command = [sys.executable, "-m", "paceline", "sft", *args, "output_dir=run", mode]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "Retry" not in done.stderr
    error = done.stderr[done.stderr.index("error: ") :]
    assert error.count("\n") == 1
    for part in ("a/b", "cannot be reached from this machine", "HF_ENDPOINT", "give its folder"):
        assert part in error
    assert not (tmp_path / "run").exists()


def test_offline_mode_finds_a_cached_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    code = (
        "from paceline.config.schema import Config\nfrom paceline.models.files import"
        " check_hub\ncheck_hub(Config(model='a/b', dataset='d'))\nimport"
        " huggingface_hub\nprint(huggingface_hub.is_offline_mode())"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "True", done.stderr

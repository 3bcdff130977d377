"""`checkpoint_dir` in an object store (the S3 API of a moto server) and in a folder."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MICRO, digest, events, run, start, wait_for_step
from s3_server import s3_server, use_server

from paceline.checkpoint import store as checkpoint
from paceline.checkpoint.format import MANIFEST
from paceline.checkpoint.reader import read_state
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError, fetch_checkpoint
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.urls import check_url
from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog, read_events
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.parallel.state import TensorShard

pytestmark = pytest.mark.slow

META = {"strategy": "made up", "world_size": 1, "config": {}}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[str]:
    """Start a server with the S3 API and return its address. It is started for the module, because
    no test may leave a process behind."""
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set and return the environment of a client, and create a bucket."""
    return use_server(server, monkeypatch)


@pytest.fixture(params=["s3", "folder"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    request.getfixturevalue("s3")
    return f"s3://bucket/{uuid.uuid4().hex}"


def make_shards(step: int) -> list[TensorShard]:
    return [TensorShard.full("model/weight", torch.arange(5000, dtype=torch.float32) + step)]


def make_manager(root: Path, store_url: str, keep: int | None = None) -> CheckpointManager:
    store = CheckpointStore(store_url)
    store.claim(root)
    world = Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu"))
    return CheckpointManager(
        world,
        root / "checkpoints",
        keep,
        EventLog(root / "events.jsonl"),
        background=False,
        store=store,
    )


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, lambda: make_shards(step), META, must_succeed=True)  # noqa: B023


def make_run_folder(root: Path) -> Path:
    root.mkdir()
    return root


@pytest.mark.soak
def test_save_prune_fetch_and_detect_damage(store_url: str, tmp_path: Path) -> None:
    first = make_run_folder(tmp_path / "first")
    save(make_manager(first, store_url, keep=2), 1, 2, 3)
    store = CheckpointStore(store_url)
    assert store.names() == ["step-00000002", "step-00000003"]
    assert [path.name for path in checkpoint.committed(first / "checkpoints")] == ["step-00000003"]
    assert {path.split("/")[0] for path in store._objects()} == {
        "claims",
        "step-00000002",
        "step-00000003",
    }
    # Another host fetches the latest checkpoint; a second process finds it already present.
    other_host, warnings = tmp_path / "other", []
    for _ in range(2):
        CheckpointStore(store_url).fetch_latest(other_host / "checkpoints", warnings.append)
    (path,) = checkpoint.committed(other_host / "checkpoints")
    assert torch.equal(read_state(path)["model/weight"], make_shards(3)[0].tensor)
    assert not warnings
    # If a byte of the latest checkpoint changes, it is reported and skipped.
    name = store._path("step-00000003", "state-00000-of-00001.safetensors")
    raw = bytearray(store._fs.cat_file(name))
    raw[len(raw) // 2] ^= 1
    store._fs.pipe_file(name, bytes(raw))
    third = tmp_path / "third" / "checkpoints"
    CheckpointStore(store_url).fetch_latest(third, warnings.append)
    assert [path.name for path in checkpoint.committed(third)] == ["step-00000002"]
    assert f"{store_url}/step-00000003/state-00000-of-00001.safetensors has SHA-256" in warnings[0]
    with pytest.raises(ConfigError, match="has SHA-256"):
        fetch_checkpoint(f"{store_url}/step-00000003", tmp_path / "fourth", warnings.append)
    assert fetch_checkpoint(store_url, tmp_path / "fourth", warnings.append).name == "step-00000002"


def test_repeated_request_finds_its_own_object(s3: dict[str, str], tmp_path: Path) -> None:
    store = CheckpointStore(f"s3://bucket/{uuid.uuid4().hex}")
    pipe_file = store._fs.pipe_file

    def pipe_twice(*args: Any, **options: Any) -> None:  # as if the first response were lost
        pipe_file(*args, **options)
        pipe_file(*args, **options)

    store._fs.pipe_file = pipe_twice
    try:
        store.claim(tmp_path)
    finally:
        del store._fs.pipe_file
    assert store._claims() == [1]
    store._check_claim()
    with pytest.raises(FileExistsError):
        store._create("claims/claim-00000001.json", b"another run")


def test_sent_bytes_count_as_progress(store_url: str, tmp_path: Path) -> None:
    manager = make_manager(make_run_folder(tmp_path / "run"), store_url)
    assert manager.store is not None
    path = tmp_path / "run" / "checkpoints"
    manager.store, store = None, manager.store
    save(manager, 1)
    ticks: list[int] = []
    store.publish(path / "step-00000001", lambda: ticks.append(1))
    assert len(ticks) >= len(list((path / "step-00000001").iterdir())) - 1  # without the manifest


def test_interrupted_upload_is_ignored_and_removed(store_url: str, tmp_path: Path) -> None:
    manager = make_manager(make_run_folder(tmp_path / "run"), store_url)
    save(manager, 1)
    assert manager.store is not None
    fs = manager.store._fs
    create, put = manager.store._create, fs.put_file

    def fail(*args: Any) -> None:
        raise OSError("the connection was reset")

    for method in ("_create", "put_file"):  # at the manifest, and at another file
        if method == "_create":
            manager.store._create = fail  # type: ignore[method-assign]
        else:
            manager.store._create = create  # type: ignore[method-assign]
            fs.put_file = lambda local, remote, **options: (
                fail() if remote.endswith("meta.json") else put(local, remote, **options)
            )
        step = 2 if method == "_create" else 3
        manager.save(step, lambda: make_shards(step), META, must_succeed=False)  # noqa: B023
    errors = [
        event.get("error", "")
        for event in read_events(tmp_path / "run" / "events.jsonl")
        if event["type"] == "checkpoint"
    ]
    assert [
        ("could not be uploaded" in error and "connection was reset" in error) for error in errors
    ] == [False, True, True]
    store = CheckpointStore(store_url)
    assert store.names() == ["step-00000001"]
    assert any(path.startswith("step-00000002/") for path in store._objects())
    store.claim(tmp_path / "run")
    assert {path.split("/")[0] for path in store._objects()} == {"claims", "step-00000001"}


@pytest.mark.soak
def test_second_claim_stops_first_run(store_url: str, tmp_path: Path) -> None:
    first = make_manager(make_run_folder(tmp_path / "first"), store_url)
    save(first, 1)
    second = CheckpointStore(store_url)
    previous_owner = second.claim(tmp_path / "second")
    assert previous_owner is not None
    assert previous_owner.output_dir == str(tmp_path / "first")
    with pytest.raises(ClaimLostError, match=str(tmp_path / "second")) as caught:
        save(first, 2)
    assert caught.value.exit_code == 2
    assert second.names() == ["step-00000001"]
    # If two runs claim the store at the same time, only one of them gets the number.
    third, fourth = CheckpointStore(store_url), CheckpointStore(store_url)
    claims, calls = fourth._claims, []

    def claims_before_concurrent_claim() -> list[int]:
        numbers = claims()
        if not calls:
            calls.append(third.claim(tmp_path / "third"))
        return numbers

    fourth._claims = claims_before_concurrent_claim  # type: ignore[method-assign]
    fourth.claim(tmp_path / "fourth")
    with pytest.raises(ClaimLostError, match="fourth"):
        third.publish(first.folder / "step-00000001")
    # A manifest that another run has written in the meantime is not replaced.
    other_manifest = fourth._path("step-00000001", MANIFEST)
    fourth._fs.pipe_file(other_manifest, b"{}")
    fourth._fs.exists = lambda path: False
    with pytest.raises(ClaimLostError):
        fourth.publish(first.folder / "step-00000001")
    assert fourth._fs.cat_file(other_manifest) == b"{}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "scheme 'ftp'"),
        ("s3:///x", "has no bucket name"),
        ("s3://key:secret@bucket/x", "contains credentials"),
        ("gs://bucket/x", "pip install 'gcsfs'"),
    ],
)
def test_rejects_unusable_checkpoint_dir(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_url("checkpoint_dir", url)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_package_error_names_extra(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name, *a: None if"
        " name == 's3fs' else find(name, *a)\nfrom paceline.checkpoint.urls import"
        " check_url\ncheck_url('checkpoint_dir', 's3://bucket/x')\n"
    )
    process = subprocess.run(
        [sys.executable, str(tmp_path / "hidden.py")], capture_output=True, text=True
    )
    assert "pip install 'paceline[s3]'" in process.stderr


@pytest.mark.soak
def test_error_for_missing_bucket(s3: dict[str, str], tmp_path: Path) -> None:
    process = run(
        *MICRO, f"output_dir={tmp_path / 'run'}", "checkpoint_dir=s3://missing/x", expect=2
    )
    assert (
        "`checkpoint_dir: s3://missing/x` cannot be used: The specified bucket does not exist"
        in process.stderr
    )
    assert not (tmp_path / "run").exists()


ARGS = (
    *MICRO,
    "train_args.lr_scheduler_type=constant",
    "train_args.logging_steps=1",
    "train_args.save_steps=2",
)


@pytest.mark.soak
def test_run_with_lost_disk_resumes_from_store(s3: dict[str, str], tmp_path: Path) -> None:
    store_url = f"s3://bucket/{uuid.uuid4().hex}"
    first, second = tmp_path / "first", tmp_path / "second"
    args = (*ARGS, f"checkpoint_dir={store_url}", "parallel.mode=single", "--allow-config-change")
    run(*args, f"output_dir={first}", "train_args.max_steps=2")
    (first / "checkpoints").rename(tmp_path / "lost")
    process = run(*args, f"output_dir={second}", "train_args.max_steps=3")
    assert "resuming from step 2 of 3" in process.stderr
    assert f"was last written by the run in {first}" in process.stderr
    assert [event["url"] for event in events(second, "checkpoint")] == [
        f"{store_url}/step-00000003"
    ]
    assert CheckpointStore(store_url).names() == ["step-00000002", "step-00000003"]
    for file in [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix in (".yaml", ".jsonl", ".json", ".html")
    ]:
        assert s3["AWS_SECRET_ACCESS_KEY"] not in file.read_text(errors="replace"), file


@pytest.mark.soak
def test_result_does_not_depend_on_store(s3: dict[str, str], tmp_path: Path) -> None:
    store_url = f"s3://bucket/{uuid.uuid4().hex}"
    args = (*ARGS, "parallel.mode=zero3", "parallel.num_gpus=2", "--allow-config-change")
    run(*args, f"output_dir={tmp_path / 'uninterrupted'}", "train_args.max_steps=6")
    run(
        *args,
        f"output_dir={tmp_path / 'first'}",
        f"checkpoint_dir={store_url}",
        "train_args.max_steps=4",
    )
    run(
        *args,
        f"output_dir={tmp_path / 'second'}",
        f"checkpoint_dir={store_url}",
        "train_args.max_steps=6",
    )
    inspected = json.loads(run(store_url, "--json", verb="inspect").stdout)
    assert inspected["step"] == 6
    assert inspected["digest"] == digest(tmp_path / "uninterrupted")
    # Another run can resume from a checkpoint in the store.
    run(
        *args,
        f"output_dir={tmp_path / 'third'}",
        f"resume={store_url}/step-00000004",
        "train_args.max_steps=5",
    )
    assert [event["step"] for event in events(tmp_path / "third", "step")] == [5]


@pytest.mark.soak
def test_run_that_lost_its_claim_exits_with_2(s3: dict[str, str], tmp_path: Path) -> None:
    store_url = f"s3://bucket/{uuid.uuid4().hex}"
    args = (
        *ARGS,
        f"checkpoint_dir={store_url}",
        "parallel.mode=zero3",
        "parallel.num_gpus=2",
        "train_args.max_steps=5000",
    )
    first = start(*args, f"output_dir={tmp_path / 'first'}")
    wait_for_step(tmp_path / "first", 3, first)
    CheckpointStore(store_url).claim(tmp_path / "second")
    _, output = first.communicate(timeout=120)
    assert first.returncode == 2, output[-2000:]
    assert f"now belongs to the run in {tmp_path / 'second'} on host" in output

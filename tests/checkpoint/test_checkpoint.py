"""Checkpoints are committed atomically, verified by hashes, and never loaded with pickle."""

import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disks import mount_tmpfs
from safetensors.torch import save_file

from paceline.checkpoint import store
from paceline.checkpoint.integrity import foreign_files, verify
from paceline.checkpoint.reader import read_meta, read_state
from paceline.core.errors import ConfigError, RunError

STATE = "state-00000-of-00001.safetensors"
META = {"strategy": "ddp", "world_size": 2, "config": {}}


def make_state(step: int, elements: int = 1000) -> dict[str, torch.Tensor]:
    values = torch.arange(elements, dtype=torch.float32) + step
    return {
        "model/weight": values,
        "optimizer/weight/exp_avg": values.to(torch.bfloat16),
        "schedule/step": torch.tensor(step),
    }


def save(folder: Path, *steps: int) -> list[Path]:
    return [store.save(folder, step, make_state(step), META).path for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_state_can_be_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (path,) = save(folder, 40)
    assert path == folder / "step-00000040"
    assert verify(path) is None
    assert read_meta(path) == {**META, "step": 40}
    loaded = read_state(path)
    assert set(loaded) == set(make_state(40))
    for name, value in make_state(40).items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)


def test_latest_valid_checkpoint_is_selected(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, second, third = save(folder, 9, 10, 100_000_000)
    assert store.committed(folder) == [first, second, third]  # ordered by step, not by name
    assert store.find(tmp_path / "run") == store.find(folder) == third
    assert store.find(first) == first
    (third / STATE).write_bytes(b"")
    path, problems = store.latest_valid(folder)
    assert path == second
    assert len(problems) == 1
    assert str(third) in problems[0]


def test_prune_keeps_latest_checkpoints(tmp_path: Path) -> None:
    paths = save(tmp_path, 1, 2, 3, 4)
    assert store.prune(tmp_path, None) == []
    assert store.prune(tmp_path, 3) == paths[:1]
    assert store.prune(tmp_path, 1) == paths[1:3]
    assert store.prune(tmp_path, 5) == []
    assert names(tmp_path) == ["step-00000004"]
    assert verify(paths[3]) is None


def test_saving_same_step_replaces_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 7)
    store.save(tmp_path, 7, make_state(8), META)
    assert names(tmp_path) == ["step-00000007"]
    assert torch.equal(
        read_state(tmp_path / "step-00000007")["model/weight"], make_state(8)["model/weight"]
    )


# -- damaged and modified files
def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip_bit(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(bytes(raw))


def remove(file: Path) -> None:
    file.unlink()


def replace_by_link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


@pytest.mark.parametrize("name", [STATE, "index.json", "meta.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, " bytes: expected "),
        (flip_bit, "SHA-256"),
        (remove, "is missing"),
        (replace_by_link, "is a symbolic link to"),
    ],
)
def test_damaged_file_is_detected(
    tmp_path: Path, damage: Callable[[Path], None], message: str, name: str
) -> None:
    (path,) = save(tmp_path, 1)
    damage(path / name)
    sha256 = json.loads((path / "manifest.json").read_text())["files"][name]["sha256"]
    problem = verify(path)
    assert problem is not None
    assert message in problem
    assert str(path / name) in problem
    assert damage is replace_by_link or sha256[:16] in problem
    assert store.latest_valid(tmp_path)[0] is None
    with pytest.raises(ConfigError):
        store.inspect(path)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"meta.json": 3}}',
        '{"files": 3}',
        '{"files": {"state.safetensors": 3, "meta.json": 3}}',
    ],
)
def test_damaged_manifest_is_detected(tmp_path: Path, manifest: str) -> None:
    (path,) = save(tmp_path, 1)
    (path / "manifest.json").write_text(manifest)
    problem = verify(path)
    assert problem is not None
    assert "manifest.json" in problem
    (path / "manifest.json").unlink()
    assert verify(path) == f"{path / 'manifest.json'} is missing or damaged"


def test_manifest_cannot_list_files_outside_checkpoint(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (tmp_path / "outside").write_text("x")
    manifest["files"]["../outside"] = {"size_bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "outside" in str(verify(path))


def test_swapped_files_are_detected(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, 2)
    for name in (STATE, "index.json", "meta.json"):  # same size, so only the hash differs
        file, other_file = (path / name for path in (first, second))
        content = file.read_bytes()
        shutil.copyfile(other_file, file)
        assert file.read_bytes() == content or f"{file} has SHA-256 " in str(verify(first))
        file.write_bytes(content)
        assert verify(first) is None


def test_manifest_must_not_be_symbolic_link(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    replace_by_link(path / "manifest.json")
    assert verify(path) == f"{path / 'manifest.json'} is a symbolic link"


def test_foreign_files_are_reported_and_pickles_rejected(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 1)
    assert foreign_files(path) == []
    (path / "notes.txt").write_text("best run so far")
    (path / "plots").mkdir()
    assert verify(path) is None
    assert foreign_files(path) == ["notes.txt", "plots"]  # reported, but not read
    (tmp_path / "outside").write_text("x")
    (path / "link").symlink_to(tmp_path / "outside")
    assert f"{path / 'link'} is a symbolic link to {tmp_path / 'outside'}" in str(verify(path))
    (path / "link").unlink()
    archive = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, archive)
    for name, raw in (
        ("optimizer.pt", b""),
        ("rng.pkl", pickle.dumps(1)),
        ("extra", pickle.dumps(1)),
        ("pytorch_model.bin", archive.getvalue()),
    ):
        (path / name).write_bytes(raw)
        assert f"{path / name} is a pickle" in str(verify(path))
        assert store.latest_valid(tmp_path / "checkpoints")[0] is None
        (path / name).unlink()
    assert store.latest_valid(tmp_path / "checkpoints") == (path, [])


def test_pickle_listed_in_manifest_is_rejected(tmp_path: Path) -> None:
    """Matching hashes are not sufficient: the file must belong to the format."""
    (path,) = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("extra.pkl", STATE):
        raw = pickle.dumps(make_state(1))
        (path / name).write_bytes(raw)
        entry = {"size_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (path / "manifest.json").write_text(
            json.dumps({"files": {**manifest["files"], name: entry}})
        )
        expected = {
            "extra.pkl": "lists 'extra.pkl', which is not a file of a checkpoint",
            STATE: f"{path / STATE} is not a safetensors file",
        }
        assert expected[name] in str(verify(path))
        if name != STATE:
            (path / name).unlink()


def test_checkpoint_that_is_symbolic_link(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (first,) = save(folder, 1)
    (second,) = save(tmp_path / "outside", 2)
    (folder / second.name).symlink_to(second)
    path, problems = store.latest_valid(folder)
    assert path == first
    assert len(problems) == 1
    assert (
        f"{folder / second.name} is a symbolic link to {second}, outside of the run's folder"
        in problems[0]
    )
    # A link is accepted if it is named explicitly.
    assert store.find(folder / second.name) == folder / second.name
    warnings: list[str] = []
    assert store.find(tmp_path / "run", warnings.append) == first
    assert warnings == problems
    (folder / second.name).unlink()
    (tmp_path / "run" / "archive").mkdir()
    second.rename(tmp_path / "run" / "archive" / second.name)
    # A link to a target inside the run's folder is followed.
    (folder / second.name).symlink_to(tmp_path / "run" / "archive" / second.name)
    assert store.latest_valid(folder) == (folder / second.name, [])
    assert store.prune(folder, 1) == [first]
    save(folder, 3)
    store.prune(folder, 1)
    assert names(folder) == ["step-00000003"]  # only the link is removed, not its target
    assert verify(tmp_path / "run" / "archive" / second.name) is None
    os.rename(folder, tmp_path / "other-disk")
    folder.symlink_to(tmp_path / "other-disk")  # all checkpoints on another disk
    assert store.latest_valid(folder) == (folder / "step-00000003", [])


def test_superseded_steps_are_pruned(tmp_path: Path) -> None:
    """A run resumes from step 2, because steps 3 and 4 are damaged, and saves step 3 again."""
    _, second, third, fourth = save(tmp_path, 1, 2, 3, 4)
    flip_bit(third / STATE)
    flip_bit(fourth / STATE)
    assert store.latest_valid(tmp_path)[0] == second
    save(tmp_path, 3)
    assert store.prune(tmp_path, 2, superseded=[4]) == [fourth, tmp_path / "step-00000001"]
    assert store.latest_valid(tmp_path) == (third, [])
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert store.prune(tmp_path, None, superseded=[3]) == [third]


class _TouchOnUnpickle:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path(self.path),))


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 1)
    malicious_pickle = pickle.dumps(_TouchOnUnpickle(str(tmp_path / "executed")))
    for name in (
        STATE,
        "state.safetensors",
        "index.json",
        "meta.json",
        "manifest.json",
        "state.pt",
        "extra.pkl",
    ):
        (path / name).write_bytes(malicious_pickle)
    assert verify(path) is not None
    for read in (store.inspect, read_meta, read_state):
        with pytest.raises(Exception):  # noqa: B017, PT011  (any error will do)
            read(path)
    assert not (tmp_path / "executed").exists()
    source = Path(store.__file__).read_text()
    assert "torch.load" not in source
    assert "import pickle" not in source


# -- digest
def test_digest_does_not_depend_on_tensor_order(tmp_path: Path) -> None:
    first = store.save(tmp_path / "a", 1, make_state(1), META).path
    second = store.save(tmp_path / "b", 1, dict(reversed(make_state(1).items())), META).path
    save_file(
        dict(sorted(make_state(1).items(), reverse=True)),
        str(tmp_path / "c.safetensors"),
        metadata={"by": "another tool"},
    )
    contents = [store.inspect(path) for path in (first, second)]
    assert contents[0]["digest"] == contents[1]["digest"]
    assert contents[0]["tensors"]["model/weight"] == {
        "dtype": "F32", "shape": [1000], "sha256": contents[1]["tensors"]["model/weight"]["sha256"],
    }  # fmt: skip


def test_digest_depends_on_every_bit(tmp_path: Path) -> None:
    def digests(name: str, changed: dict[str, torch.Tensor]) -> tuple[str, str]:
        contents = store.inspect(
            store.save(tmp_path / name, 1, {**make_state(1), **changed}, META).path
        )
        return contents["digest"], contents["model_digest"]

    original = digests("original", {})
    assert digests("copy", {}) == original
    weight = make_state(1)["model/weight"].clone()
    weight.view(torch.int32)[500] ^= 1
    assert digests("weight", {"model/weight": weight})[0] != original[0]
    assert digests("weight2", {"model/weight": weight})[1] != original[1]
    number, model = digests("number", {"schedule/step": torch.tensor(2)})
    assert number != original[0]
    assert model == original[1]
    assert (
        digests("shape", {"model/weight": make_state(1)["model/weight"].view(10, 100)}) != original
    )
    assert digests("dtype", {"schedule/step": torch.tensor(1, dtype=torch.int32)})[0] != original[0]


# -- a save that fails partway
_LIMITED_FILE_SIZE_SCRIPT = """
import resource, signal, sys
from pathlib import Path
import torch
from paceline.core.errors import RunError
from paceline.checkpoint import store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {"model/weight": torch.ones(100_000)}
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    store.save(Path(sys.argv[1]), 2, state, {"strategy": "single", "world_size": 1})
except RunError as error:
    print(error.paragraph())
else:
    raise SystemExit("the save did not fail")
"""


def test_save_fails_at_file_size_limit(tmp_path: Path) -> None:
    assert hasattr(resource, "RLIMIT_FSIZE")
    assert hasattr(signal, "SIGXFSZ")
    (first,) = save(tmp_path, 1)
    process = subprocess.run(
        [sys.executable, "-c", _LIMITED_FILE_SIZE_SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert "the checkpoint of step 2 could not be written" in process.stdout
    assert str(tmp_path / "step-00000002") in process.stdout
    assert "400,000 bytes" in process.stdout
    assert names(tmp_path) == [first.name]
    assert verify(first) is None


def test_save_fails_on_full_disk(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=1m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "checkpoints"
        first = store.save(folder, 1, make_state(1, 100_000), META).path
        with pytest.raises(
            RunError, match=r"step 2 could not be written to .*step-00000002: .*No space left"
        ) as caught:
            store.save(folder, 2, make_state(2, 100_000), META)
        assert "it needs 600,008 bytes" in str(caught.value)
        assert names(folder) == [first.name]
        assert store.find(tmp_path / "small") == first
        # A smaller checkpoint can still be saved.
        assert store.save(folder, 3, make_state(3, 10), META).path.name == "step-00000003"


def test_next_save_removes_files_of_killed_save(tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.123.tmp").mkdir()
    (tmp_path / ".step-00000003.123.tmp" / "state.safetensors").write_bytes(b"incomplete")
    assert store.latest_valid(tmp_path) == (None, [])
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_save_fails_if_path_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="could not be written"):
        store.save(tmp_path / "file" / "checkpoints", 1, make_state(1), META)


@pytest.mark.parametrize("kind", [None, "folder", "file"])
def test_find_rejects_path_without_checkpoint(tmp_path: Path, kind: str | None) -> None:
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("x")
    with pytest.raises(
        ConfigError, match="does not exist" if kind is None else "contains no valid checkpoint"
    ):
        store.find(path)

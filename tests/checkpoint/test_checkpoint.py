"""A checkpoint is there whole or not at all, keeps what it says, and is never a pickle."""

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


def state(step: int, elements: int = 1000) -> dict[str, torch.Tensor]:
    values = torch.arange(elements, dtype=torch.float32) + step
    return {
        "model/weight": values,
        "optimizer/weight/exp_avg": values.to(torch.bfloat16),
        "schedule/step": torch.tensor(step),
    }


def save(folder: Path, *steps: int) -> list[Path]:
    return [store.save(folder, step, state(step), META).path for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (path,) = save(folder, 40)
    assert path == folder / "step-00000040"
    assert verify(path) is None
    assert read_meta(path) == {**META, "step": 40}
    loaded = read_state(path)
    assert set(loaded) == set(state(40))
    for name, value in state(40).items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, second, third = save(folder, 9, 10, 100_000_000)
    assert store.committed(folder) == [first, second, third]  # by number, not by name
    assert store.find(tmp_path / "run") == store.find(folder) == third
    assert store.find(first) == first
    (third / STATE).write_bytes(b"")
    path, wrong = store.latest_valid(folder)
    assert path == second
    assert len(wrong) == 1
    assert str(third) in wrong[0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    paths = save(tmp_path, 1, 2, 3, 4)
    assert store.prune(tmp_path, None) == []
    assert store.prune(tmp_path, 3) == paths[:1]
    assert store.prune(tmp_path, 1) == paths[1:3]
    assert store.prune(tmp_path, 5) == []
    assert names(tmp_path) == ["step-00000004"]
    assert verify(paths[3]) is None


def test_the_same_step_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    save(tmp_path, 7)
    store.save(tmp_path, 7, state(8), META)
    assert names(tmp_path) == ["step-00000007"]
    assert torch.equal(
        read_state(tmp_path / "step-00000007")["model/weight"], state(8)["model/weight"]
    )


# -- tampering
def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(bytes(raw))


def take_away(file: Path) -> None:
    file.unlink()


def link(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


@pytest.mark.parametrize("name", [STATE, "index.json", "meta.json"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, " bytes: expected "),
        (flip, "SHA-256"),
        (take_away, "is missing"),
        (link, "is a symbolic link to"),
    ],
)
def test_harm_is_seen(
    tmp_path: Path, harm: Callable[[Path], None], message: str, name: str
) -> None:
    (path,) = save(tmp_path, 1)
    harm(path / name)
    sha256 = json.loads((path / "manifest.json").read_text())["files"][name]["sha256"]
    problem = verify(path)
    assert problem is not None
    assert message in problem
    assert str(path / name) in problem
    assert harm is link or sha256[:16] in problem
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
def test_a_broken_manifest_is_seen(tmp_path: Path, manifest: str) -> None:
    (path,) = save(tmp_path, 1)
    (path / "manifest.json").write_text(manifest)
    problem = verify(path)
    assert problem is not None
    assert "manifest.json" in problem
    (path / "manifest.json").unlink()
    assert verify(path) == f"{path / 'manifest.json'} is missing or damaged"


def test_a_manifest_does_not_point_outside(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (tmp_path / "outside").write_text("x")
    manifest["files"]["../outside"] = {"size_bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "outside" in str(verify(path))


def test_files_that_changed_places(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, 2)
    for name in (STATE, "index.json", "meta.json"):  # of the same size: the hash alone tells
        file, other_file = (path / name for path in (first, second))
        content = file.read_bytes()
        shutil.copyfile(other_file, file)
        assert file.read_bytes() == content or f"{file} has SHA-256 " in str(verify(first))
        file.write_bytes(content)
        assert verify(first) is None


def test_a_manifest_that_is_a_link(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    link(path / "manifest.json")
    assert verify(path) == f"{path / 'manifest.json'} is a symbolic link"


def test_what_does_not_belong_there(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 1)
    assert foreign_files(path) == []
    (path / "notes.txt").write_text("the good one")
    (path / "plots").mkdir()
    assert verify(path) is None
    assert foreign_files(path) == ["notes.txt", "plots"]  # said, and not read
    (tmp_path / "elsewhere").write_text("x")
    (path / "more").symlink_to(tmp_path / "elsewhere")
    assert f"{path / 'more'} is a symbolic link to {tmp_path / 'elsewhere'}" in str(verify(path))
    (path / "more").unlink()
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


def test_a_pickle_that_the_manifest_names(tmp_path: Path) -> None:
    """Hashes that fit do not make a file a checkpoint's."""
    (path,) = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("extra.pkl", STATE):
        raw = pickle.dumps(state(1))
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


def test_a_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (first,) = save(folder, 1)
    (second,) = save(tmp_path / "elsewhere", 2)
    (folder / second.name).symlink_to(second)
    path, problems = store.latest_valid(folder)
    assert path == first
    assert len(problems) == 1
    assert (
        f"{folder / second.name} is a symbolic link to {second}, outside of the run's folder"
        in problems[0]
    )
    assert store.find(folder / second.name) == folder / second.name  # named by hand it is taken
    warnings: list[str] = []
    assert store.find(tmp_path / "run", warnings.append) == first
    assert warnings == problems
    (folder / second.name).unlink()
    (tmp_path / "run" / "kept").mkdir()
    second.rename(tmp_path / "run" / "kept" / second.name)
    (folder / second.name).symlink_to(tmp_path / "run" / "kept" / second.name)  # within the run
    assert store.latest_valid(folder) == (folder / second.name, [])
    assert store.prune(folder, 1) == [first]
    save(folder, 3)
    store.prune(folder, 1)
    assert names(folder) == ["step-00000003"]  # of a link the link alone is removed
    assert verify(tmp_path / "run" / "kept" / second.name) is None
    os.rename(folder, tmp_path / "big-disk")
    folder.symlink_to(tmp_path / "big-disk")  # all checkpoints on another disk
    assert store.latest_valid(folder) == (folder / "step-00000003", [])


def test_steps_that_no_longer_count(tmp_path: Path) -> None:
    """A run goes on from step 2, for 3 and 4 are broken, and writes step 3 anew."""
    _, second, third, fourth = save(tmp_path, 1, 2, 3, 4)
    flip(third / STATE)
    flip(fourth / STATE)
    assert store.latest_valid(tmp_path)[0] == second
    save(tmp_path, 3)
    assert store.prune(tmp_path, 2, superseded=[4]) == [fourth, tmp_path / "step-00000001"]
    assert store.latest_valid(tmp_path) == (third, [])
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert store.prune(tmp_path, None, superseded=[3]) == [third]


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path(self.path),))


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (path,) = save(tmp_path / "checkpoints", 1)
    bomb = pickle.dumps(_Bomb(str(tmp_path / "went-off")))
    for name in (
        STATE,
        "state.safetensors",
        "index.json",
        "meta.json",
        "manifest.json",
        "state.pt",
        "extra.pkl",
    ):
        (path / name).write_bytes(bomb)
    assert verify(path) is not None
    for read in (store.inspect, read_meta, read_state):
        with pytest.raises(Exception):  # noqa: B017, PT011  (whatever it is, nothing has run)
            read(path)
    assert not (tmp_path / "went-off").exists()
    source = Path(store.__file__).read_text()
    assert "torch.load" not in source
    assert "import pickle" not in source


# -- the digest
def test_the_digest_does_not_depend_on_the_order_of_the_tensors(tmp_path: Path) -> None:
    first = store.save(tmp_path / "a", 1, state(1), META).path
    second = store.save(tmp_path / "b", 1, dict(reversed(state(1).items())), META).path
    save_file(
        dict(sorted(state(1).items(), reverse=True)),
        str(tmp_path / "c.safetensors"),
        metadata={"by": "someone else"},
    )
    contents = [store.inspect(path) for path in (first, second)]
    assert contents[0]["digest"] == contents[1]["digest"]
    assert contents[0]["tensors"]["model/weight"] == {
        "dtype": "F32", "shape": [1000], "sha256": contents[1]["tensors"]["model/weight"]["sha256"],
    }  # fmt: skip


def test_the_digest_sees_every_bit(tmp_path: Path) -> None:
    def digests(name: str, changed: dict[str, torch.Tensor]) -> tuple[str, str]:
        contents = store.inspect(store.save(tmp_path / name, 1, {**state(1), **changed}, META).path)
        return contents["digest"], contents["model_digest"]

    plain = digests("plain", {})
    assert digests("again", {}) == plain
    weight = state(1)["model/weight"].clone()
    weight.view(torch.int32)[500] ^= 1
    assert digests("weight", {"model/weight": weight})[0] != plain[0]
    assert digests("weight2", {"model/weight": weight})[1] != plain[1]
    number, model = digests("number", {"schedule/step": torch.tensor(2)})
    assert number != plain[0]
    assert model == plain[1]
    assert digests("shape", {"model/weight": state(1)["model/weight"].view(10, 100)}) != plain
    assert digests("dtype", {"schedule/step": torch.tensor(1, dtype=torch.int32)})[0] != plain[0]


# -- a save that fails part-way
_LIMITED = """
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
    raise SystemExit("it was saved")
"""


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    assert hasattr(resource, "RLIMIT_FSIZE")
    assert hasattr(signal, "SIGXFSZ")
    (first,) = save(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 2 could not be written" in done.stdout
    assert str(tmp_path / "step-00000002") in done.stdout
    assert "400,000 bytes" in done.stdout
    assert names(tmp_path) == [first.name]
    assert verify(first) is None


def test_a_disk_that_fills(tmp_path: Path) -> None:
    with mount_tmpfs(tmp_path / "small", "size=1m") as mounted:
        if not mounted:
            return
        folder = tmp_path / "small" / "checkpoints"
        first = store.save(folder, 1, state(1, 100_000), META).path
        with pytest.raises(
            RunError, match=r"step 2 could not be written to .*step-00000002: .*No space left"
        ) as caught:
            store.save(folder, 2, state(2, 100_000), META)
        assert "it needs 600,008 bytes" in str(caught.value)
        assert names(folder) == [first.name]
        assert store.find(tmp_path / "small") == first
        # what fits is saved again
        assert store.save(folder, 3, state(3, 10), META).path.name == "step-00000003"


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.123.tmp").mkdir()
    (tmp_path / ".step-00000003.123.tmp" / "state.safetensors").write_bytes(b"half")
    assert store.latest_valid(tmp_path) == (None, [])
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="could not be written"):
        store.save(tmp_path / "file" / "checkpoints", 1, state(1), META)


@pytest.mark.parametrize("made", [None, "folder", "file"])
def test_what_is_no_checkpoint(tmp_path: Path, made: str | None) -> None:
    path = tmp_path / "x"
    if made == "folder":
        path.mkdir()
    elif made == "file":
        path.write_text("x")
    with pytest.raises(
        ConfigError, match="does not exist" if made is None else "contains no valid checkpoint"
    ):
        store.find(path)

"""Checkpoints: a folder that appears whole or not at all, with a manifest of sizes and SHA-256. No pickle, no torch here.

``checkpoints/step-00000040/`` holds ``state.safetensors`` (the full training state, named the same whatever strategy wrote
it), ``meta.json`` (step, config, who wrote it) and ``manifest.json``. It is written beside under a hidden name, synced, and
renamed; what is left over of a save that was cut is cleared by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, RunError
from paceline.core.files import fsync_dir, human_bytes, sha256_file, sync_tree

if TYPE_CHECKING:
    import torch

STATE, META, MANIFEST = "state.safetensors", "meta.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    size_bytes: int


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(folder: Path, step: int, state: dict[str, torch.Tensor], meta: dict[str, Any]) -> Saved:
    """Write a checkpoint of ``step`` below ``folder`` (``RUN/checkpoints``).

    Raises:
        RunError: it could not be written (full disk, no permission); every earlier checkpoint is untouched and what was
            begun is removed.
    """
    from safetensors.torch import save_file

    final = folder / name_of(step)
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    size = sum(one.numel() * one.element_size() for one in state.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_debris(folder)
        aside.mkdir()
        save_file(state, str(aside / STATE))
        (aside / META).write_text(json.dumps({**meta, "step": step}, indent=2) + "\n")
        files = {
            name: {"size_bytes": (aside / name).stat().st_size, "sha256": sha256_file(aside / name)} for name in (STATE, META)
        }
        (aside / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n")
        sync_tree(aside)
        if final.exists():  # left by an earlier life of the run that was rewound; the new one says the same
            shutil.rmtree(final)
        os.replace(aside, final)
        fsync_dir(folder)
    except write_errors() as error:
        shutil.rmtree(aside, ignore_errors=True)
        free = _free_bytes(folder)
        raise RunError(
            f"the checkpoint of step {step} could not be written to {final}: {reason_of(error)} "
            f"(it needs {size:,} bytes, {human_bytes(size)}; free: {human_bytes(free) if free is not None else 'not known'})",
            fix="free some space, or set another `output_dir`; earlier checkpoints are untouched and the same command goes on "
            "from the newest",
        ) from error
    return Saved(final, sum(int(one["size_bytes"]) for one in files.values()))


def write_errors() -> tuple[type[Exception], ...]:
    """What a write of tensors may raise: safetensors has an error of its own for a full disk."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


def reason_of(error: BaseException) -> str:
    """``No space left on device``, out of whatever words a library puts around it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    inner = re.search(r"I/O error: (.+?)(?: \(os error \d+\))?$", str(error))
    return inner[1] if inner else str(error)


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError:
        return None


def _clear_debris(folder: Path) -> None:
    for one in folder.glob(".step-*"):
        shutil.rmtree(one, ignore_errors=True)


def prune(folder: Path, keep: int | None) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints (None keeps all). Returns what was removed."""
    if keep is None:
        return []
    removed = []
    for path in committed(folder)[:-keep]:
        aside = folder / f".{path.name}.{os.getpid()}.old"
        os.replace(path, aside)  # gone in one step: a cut here leaves no half checkpoint under a good name
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return removed


def committed(folder: Path) -> list[Path]:
    """The checkpoints below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), one) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name)) and one.is_dir()]
    return [path for _, path in sorted(found)]


def verify(path: Path) -> str | None:
    """None where every file is there with the size and SHA-256 of the manifest; else what is wrong."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        said_of = {str(name): (int(said["size_bytes"]), str(said["sha256"])) for name, said in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path / MANIFEST} is missing or broken"
    for needed in (STATE, META):
        if needed not in said_of:
            return f"{path / MANIFEST} does not name {needed}"
    for name, (size_bytes, sha256) in said_of.items():
        file = path / name
        if Path(name).name != name or file.is_symlink() or not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size_bytes:
            return f"{file} has {file.stat().st_size:,} bytes, the manifest says {size_bytes:,}"
        if sha256_file(file) != sha256:
            return f"{file} does not have the SHA-256 that the manifest says ({sha256[:16]}…)"
    return None


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    wrong = []
    for path in reversed(committed(folder)):
        problem = verify(path)
        if problem is None:
            return path, wrong
        wrong.append(problem)
    return None, wrong


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.json`` of a checkpoint.

    Raises:
        ConfigError: ``path`` is no checkpoint.
    """
    try:
        meta = json.loads((path / META).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no checkpoint: {META} is missing or broken",
            allowed=f"a folder such as RUN/checkpoints/{name_of(40)}",
            fix="list them with `ls RUN/checkpoints`",
        ) from error
    return dict(meta)


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, on the CPU."""
    from safetensors.torch import load_file

    return load_file(str(path / STATE))


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds: ``{step, strategy, world_size, digest, model_digest, tensors: {name: {dtype, shape, sha256}}}``.

    The digest is the SHA-256 over the lines "name dtype shape sha256" in order of name: equal digests mean equal bits.
    """
    problem = verify(path)
    meta = read_meta(path)
    if problem is not None:
        raise ConfigError(
            f"the checkpoint {path} is not whole: {problem}", fix="use the one before it, or resume: auto, which does"
        )
    tensors = {name: _describe(path / STATE, entry, base) for name, entry, base in _entries(path / STATE)}
    return {
        "step": meta["step"],
        "strategy": meta["strategy"],
        "world_size": meta["world_size"],
        "digest": _digest(tensors),
        "model_digest": _digest({name: one for name, one in tensors.items() if name.startswith("model/")}),
        "tensors": tensors,
    }


def _entries(file: Path) -> list[tuple[str, dict[str, Any], int]]:
    # The format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes (safetensors' README, "Format").
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return [(name, header[name], 8 + length) for name in sorted(header)]


def _describe(file: Path, entry: dict[str, Any], base: int) -> dict[str, Any]:
    start, end = entry["data_offsets"]
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        handle.seek(base + start)
        left = end - start
        while left:
            chunk = handle.read(min(left, 1 << 20))
            digest.update(chunk)
            left -= len(chunk)
    return {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest.hexdigest()}


def _digest(tensors: dict[str, dict[str, Any]]) -> str:
    lines = [f"{name} {one['dtype']} {one['shape']} {one['sha256']}\n" for name, one in sorted(tensors.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find(path: Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest whole one of a run's folder or its ``checkpoints``.

    Raises:
        ConfigError: there is none.
    """
    if (path / META).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        newest, _ = newest_whole(folder)
        if newest is not None:
            return newest
    raise ConfigError(
        f"{path} holds no whole checkpoint" if path.exists() else f"{path} does not exist",
        allowed=f"a run's folder, or a checkpoint such as RUN/checkpoints/{name_of(40)}",
        fix=None if path.exists() else "check the path",
    )

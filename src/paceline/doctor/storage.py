"""Where a run writes: its folder, and the cache."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from paceline.core.check import Check, broken, doubtful, well
from paceline.core.files import cache_dir, human_bytes

_TRIAL_BYTES = 8 << 20


def check_disk(
    folder: Path, checkpoint_bytes: int | None, model_bytes: int, num_kept: int | None
) -> Check:
    """Free space for the checkpoints that are kept, one that is being written, and the model at the
    end.

    Args:
        checkpoint_bytes: of one checkpoint; None: not known.
        num_kept: None: all of them, however many there will be.
    """
    here = existing(folder)
    free = shutil.disk_usage(here).free
    if checkpoint_bytes is None:
        return well("disk", f"{human_bytes(free)} free in {here}")
    least = checkpoint_bytes + model_bytes
    value = (
        f"{human_bytes(free)} free in {here}; a checkpoint takes {human_bytes(checkpoint_bytes)}, "
    )
    if num_kept is None:
        most = least
        value += "and all of them are kept (`save_total_limit` is not set)"
    else:
        most = checkpoint_bytes * (num_kept + 1) + model_bytes
        value += f"{num_kept} of them and one being written, with the model, {human_bytes(most)}"
    if free < least:
        return broken("disk", value, "make room, or set `output_dir` to another disk")
    if free < most:
        return doubtful(
            "disk",
            value,
            "make room, lower `save_total_limit`, or set `output_dir` to another disk",
        )
    return well("disk", value)


def check_writing(name: str, folder: Path) -> Check:
    """A file can be written into ``folder`` (or where it is to be made), brought to the disk, and
    renamed. Leaves nothing."""
    here = existing(folder)
    aside: Path | None = None
    try:
        handle, path = tempfile.mkstemp(prefix=".paceline-doctor-", dir=here)
        aside = Path(path)
        with os.fdopen(handle, "wb") as file:
            start = time.perf_counter()
            file.write(os.urandom(1 << 16) * (_TRIAL_BYTES >> 16))
            file.flush()
            os.fsync(file.fileno())
            wall_s = time.perf_counter() - start
        renamed = aside.with_name(aside.name + ".renamed")
        aside.rename(renamed)
        aside = renamed
    except OSError as error:
        return broken(
            name,
            f"{here} cannot be written: {error.strerror or error}",
            "see its owner and rights, or name another",
        )
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink()
    return well(name, f"{here} takes {human_bytes(_TRIAL_BYTES / wall_s)}/s, brought to the disk")


def check_cache() -> Check:
    return check_writing("cache", cache_dir())


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path

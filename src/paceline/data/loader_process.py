"""Loader processes: how many a rank starts, what starts them, and what they can be given."""

import multiprocessing
import os
import pickle
import shutil
import sys
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from paceline.config.schema.train_args import TrainArgs
from paceline.core.files import human_bytes
from paceline.core.fork_server.server import join_server, start_server
from paceline.core.texts import UserText

#: Largest size of a dataset and a task that are copied into a loader process by default.
_MAX_COPIED_BYTES = 256 << 20
#: Free space that a loader process needs in /dev/shm, through which batches pass.
_MIN_SHARED_BYTES = 256 << 20
_SHARED = Path("/dev/shm")

Notice = tuple[str, str]


@dataclass
class LoaderOptions:
    """Settings of the loader processes.

    Args:
        start_method: start method of multiprocessing. Never "fork" in a process that uses an
            accelerator or NCCL: their threads and locks would be copied in an unknown state.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    start_method: str = "fork" if sys.platform == "linux" else "spawn"

    @property
    def context(self) -> BaseContext | None:
        """The context that starts the processes, or None without any."""
        return multiprocessing.get_context(self.start_method) if self.num_workers else None


def start_loader_server() -> None:
    """Start the fork server from which the loader processes of this rank are forked, unless the
    rank was itself forked from one. Called before the rank uses an accelerator, so that the
    server's imports overlap with the rank's own work. Returns immediately."""
    if not join_server():
        start_server(["paceline.data.loader"], {})


def loader_options(
    args: TrainArgs, device_type: str, num_stream_workers: int, *sent: Any
) -> tuple[LoaderOptions, list[Notice]]:
    """Return the settings of the loader processes of a rank, and notices as (level, text).

    On an accelerator, the default is one process, because collating would otherwise delay the
    launch of the next step. It is left out if ``sent`` cannot be copied into a process.

    Args:
        device_type: type of the rank's device.
        num_stream_workers: number of processes if the config does not set any and the data are
            streamed; they tokenize ahead of the step. 0 if the data are not streamed.
        sent: objects that are copied into each loader process: the datasets, and the function that
            collates.
    """
    on_cpu = device_type == "cpu"
    is_default = args.dataloader_num_workers in ("auto", 0)
    count = args.num_loader_processes(device_type)
    if is_default and num_stream_workers:
        count = num_stream_workers
    options = LoaderOptions(
        count, args.dataloader_prefetch_factor, args.dataloader_pin_memory and not on_cpu
    )
    if on_cpu or not count:
        return options, []
    is_required = bool(num_stream_workers) or not is_default
    reason = _reason_against_copying(sent)
    if reason is not None and is_required:
        setting = "streaming: false" if num_stream_workers else "dataloader_num_workers: 0"
        text = UserText(
            "loader processes are forked from ranks that use an accelerator, because {reason}."
            " If they hang, set `{setting}`",
            code="loader-forked-from-rank",
            reason=reason,
            setting=setting,
        )
        return options, [("warning", text)]
    if reason is None and not is_required:
        reason = _small_shared_memory()
    if reason is None:
        return replace(options, start_method="forkserver"), []
    text = UserText(
        "each rank collates its batches itself, without a loader process, because {reason}",
        code="no-loader-process",
        reason=reason,
    )
    return replace(options, num_workers=0), [("info", text)]


class RankEnvironment:
    """Sets the environment variables of this process in the process that unpickles this object. A
    fork server has the variables of the launcher, without the number of the rank."""

    def __reduce__(self) -> Any:
        return _set_environment, (dict(os.environ),)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _reason_against_copying(sent: object) -> str | None:
    """Return why a process that is not a fork of this one cannot get a copy of ``sent``, or should
    not by default; None if it can."""
    pickler = _CheckingPickler()
    try:
        pickler.dump(sent)
    except _NotCopied as error:
        return str(error)
    except Exception as error:  # from `__reduce__` and `__getstate__` of any class
        return f"the dataset or the task cannot be pickled ({type(error).__name__}: {error})"
    return None


def _small_shared_memory() -> str | None:
    """Return how little memory a loader process could share with its rank, or None if there is
    enough."""
    free_bytes = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else _MIN_SHARED_BYTES
    if free_bytes >= _MIN_SHARED_BYTES:
        return None
    return f"/dev/shm has only {human_bytes(free_bytes)} free (in Docker: `--shm-size=8g`)"


class _NotCopied(Exception):
    """An object that no other process should get a copy of."""


class _CheckingPickler(pickle.Pickler):
    """Pickle an object without storing the result, to see whether another process can load it.

    Raises:
        _NotCopied: the object holds a module, a tensor on an accelerator or too many bytes, or a
            class or function that another process cannot import.
    """

    def __init__(self) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self._size_bytes = 0

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        size_bytes = memoryview(data).nbytes
        self._count(size_bytes)
        return size_bytes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            raise _NotCopied(f"the dataset or the task holds a module ({type(value).__name__})")
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise _NotCopied(f"the dataset or the task holds a tensor on {value.device}")
            self._count(value.untyped_storage().nbytes())
            return int, ()
        if isinstance(value, type | FunctionType) and not _is_importable(value.__module__):
            raise _NotCopied(
                f"{value.__qualname__} is defined in {value.__module__}, which other processes"
                " cannot import"
            )
        return NotImplemented

    def _count(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        if self._size_bytes > _MAX_COPIED_BYTES:
            raise _NotCopied(
                f"the dataset holds more than {human_bytes(_MAX_COPIED_BYTES)} in memory, which"
                " each loader process would copy"
            )


@cache
def _is_importable(module: str) -> bool:
    """Return whether a new process with the same ``sys.path`` finds a module by its name."""
    name = module.partition(".")[0]
    if name == "__main__":
        return False
    if name in sys.builtin_module_names:
        return True
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, None) is not None for finder in finders)

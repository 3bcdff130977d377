"""A tiny task that injects faults in one of its ranks.

``task_args``:

- ``rank``, ``fault``, ``from_step``: from that step on, the rank is slower by 200 ms (``slow``); or
at
  that step, it skips a collective that the others call (``skip``).
- ``cut``: ``rank`` kills itself during the first save of each attempt, except in the very first
save
  of the run, so that there is a checkpoint to prune. It does so at the first file system operation,
  in the next attempt at the second, and so on, until an attempt completes. The operations are
  recorded in ``flags``.
- ``base_s``: minimum duration of a loss computation.
"""

import builtins
import io
import os
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SLOWER_BY_S = 0.2


class Faulty(paceline.Task):
    calls = 0

    def build_datasets(self):
        args = self.config.task_args
        if args.get("cut") and self._is_faulty_rank():
            SaveKiller(Path(self.config.output_dir) / "checkpoints", Path(args["flags"])).install()
        random = torch.Generator().manual_seed(0)
        x = torch.randn(240, 8, generator=random)
        return TensorDataset(x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model, batch):
        args = self.config.task_args
        self.calls += 1
        time.sleep(args.get("base_s", 0.0))
        is_slow = args.get("fault") == "slow" and self._is_faulty_rank()
        if is_slow and self.calls >= args["from_step"]:
            time.sleep(SLOWER_BY_S)
        if args.get("fault") == "skip" and self.calls == args["from_step"]:
            self._skip_collective(Path(args["flags"]) / "skipped")
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

    def _is_faulty_rank(self):
        return os.environ.get("RANK") == str(self.config.task_args.get("rank"))

    def _skip_collective(self, flag):
        """Call a collective on all ranks but the faulty one, once."""
        if flag.exists():
            return
        if self._is_faulty_rank():
            time.sleep(0.2)  # the other ranks have checked the flag
            flag.touch()
        else:
            dist.all_reduce(torch.ones(7))


class SaveKiller:
    """Count the file system operations of this process below ``folder`` up to the end of the first
    save that finds an earlier checkpoint, and kill the process before a given one."""

    def __init__(self, folder, flags):
        self.folder, self.log = f"{folder}/", flags / "cuts"
        self.log.touch()
        self.kill_at = len(self.log.read_text().splitlines()) + 1
        self.count, self.step = 0, None

    def install(self):
        for name in ("mkdir", "open", "fsync", "replace", "unlink", "rmdir"):
            setattr(os, name, self._before(name, getattr(os, name)))
        builtins.open = io.open = self._before("open", io.open)

    def _before(self, name, original):
        def wrapped(path, *args, **kwargs):
            writes = name != "open" or self._writes(*args[:1], **kwargs)
            if writes and (full := self._path(path, kwargs.get("dir_fd"))).startswith(self.folder):
                self._count(name, full.removeprefix(self.folder))
            return original(path, *args, **kwargs)

        return wrapped

    def _count(self, name, path):
        if self.step is None and not any(Path(self.folder).glob("step-*")):
            return
        match = re.match(r"\.step-(\d+)\.\d+\.tmp", path)
        if match and name in ("mkdir", "open"):
            self.step = self.step or match[1]
            if match[1] != self.step:
                self.kill_at = 0  # the second save of the attempt is not interrupted
        self.count += 1
        if self.count == self.kill_at:
            with io.open(self.log, "a") as log:  # noqa: UP020  (outside of the folder: not counted)
                log.write(f"{name} {path}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _writes(mode="r", **_options):
        return (
            bool(mode & (os.O_WRONLY | os.O_RDWR))
            if isinstance(mode, int)
            else mode[0] in "wax" or "+" in mode
        )

    @staticmethod
    def _path(path, dir_fd):
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        return (
            os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
            if dir_fd is not None
            else os.fspath(path)
        )

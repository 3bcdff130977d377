"""The tasks of ``recovery.py``: chats as `paceline sft` trains on them."""

import json
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

from paceline.distributed.progress import PROGRESS
from paceline.tasks.language import LanguageTask

#: On, off, off, on: what grows or falls over the run falls on both alike.
ORDER = (True, False, False, True)


class Switched(LanguageTask):
    """The watchdog is switched on and off every few steps, on all ranks at the same.

    ``task_args``: ``block``, steps between switches; ``file``, where rank 0 writes ``steps``,
    ``[step, begun_at_s, on]`` of each, and ``thread``, the time that the watchdog's thread was on a
    core in a second in which it was on.
    """

    seen = None

    def loss(self, model, batch):
        if PROGRESS.step is not None and model.training:
            self._note(PROGRESS.step)
        return super().loss(model, batch)

    def _note(self, step):
        """Once a step: from its first loss to the first loss of the next is what it took, with all
        that lies between."""
        if self.seen is None:
            self.seen, self.cores, self.busy_from_s = [], PROGRESS._cores, busy_s()
        if self.seen and self.seen[-1][0] == step:
            return
        args = self.config.task_args
        on = ORDER[(step - 1) // args["block"] % len(ORDER)]
        PROGRESS.active = on
        PROGRESS._cores = self.cores if on else None
        self.seen.append((step, time.perf_counter(), on))
        if step == self.config.train_args.max_steps and os.environ["RANK"] == "0":
            on_s = sum(
                after - before for (_, before, on), (_, after, _) in pairwise(self.seen) if on
            )
            result = {"steps": self.seen, "thread": (busy_s() - self.busy_from_s) / on_s}
            Path(args["file"]).write_text(json.dumps(result))


def busy_s():
    """How long the watchdog's thread has been on a core: the first number of its schedstat."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "watchdog")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) * 1e-9


class Killed(LanguageTask):
    """Rank 1 kills itself in the steps ``at``, once in each, and leaves the time of it (since the
    epoch) in ``folder``."""

    def loss(self, model, batch):
        args = self.config.task_args
        if model.training and PROGRESS.step in args["at"] and os.environ["RANK"] == "1":
            flag = Path(args["folder"]) / str(PROGRESS.step)
            if not flag.exists():
                flag.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

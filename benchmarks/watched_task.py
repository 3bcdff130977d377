"""Tasks for ``recovery.py``: language modeling as in `paceline sft`, with instrumentation."""

import json
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

from paceline.distributed.timing.progress import PROGRESS
from paceline.tasks.language import LanguageTask

#: Whether the watchdog is active in each of four blocks. This order cancels a linear drift.
ORDER = (True, False, False, True)


class AlternatingWatchdog(LanguageTask):
    """Switches the watchdog on and off every few steps, at the same steps on all ranks.

    ``task_args`` contains ``block``, the number of steps between switches, and ``file``. Rank 0
    writes two values to this file: ``steps``, a list of ``[step, start_s, is_active]``, and
    ``thread``, the CPU time of the watchdog thread per second in which it was active.
    """

    records = None

    def loss(self, model, batch):
        if PROGRESS.step is not None and model.training:
            self._record_step(PROGRESS.step)
        return super().loss(model, batch)

    def _record_step(self, step):
        """Record the start of a step, at the first call in that step. The duration of a step is the
        time until the start of the next one."""
        if self.records is None:
            self.records, self.delays = [], PROGRESS._delays
            self.cpu_s_at_start = watchdog_cpu_s()
        if self.records and self.records[-1][0] == step:
            return
        args = self.config.task_args
        is_active = ORDER[(step - 1) // args["block"] % len(ORDER)]
        PROGRESS.active = is_active
        PROGRESS._delays = self.delays if is_active else None
        self.records.append((step, time.perf_counter(), is_active))
        if step == self.config.train_args.max_steps and os.environ["RANK"] == "0":
            active_s = sum(
                end - start
                for (_, start, was_active), (_, end, _) in pairwise(self.records)
                if was_active
            )
            cpu_s = watchdog_cpu_s() - self.cpu_s_at_start
            result = {"steps": self.records, "thread": cpu_s / active_s}
            Path(args["file"]).write_text(json.dumps(result))


def watchdog_cpu_s():
    """Return the CPU time of the watchdog thread, which is the first number of its schedstat."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "watchdog")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) * 1e-9


class SelfKilling(LanguageTask):
    """Kills rank 1 once in each of the steps ``at``, after writing the time (in seconds since the
    epoch) to a file in ``folder``."""

    def loss(self, model, batch):
        args = self.config.task_args
        if model.training and PROGRESS.step in args["at"] and os.environ["RANK"] == "1":
            time_file = Path(args["folder"]) / str(PROGRESS.step)
            if not time_file.exists():
                time_file.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

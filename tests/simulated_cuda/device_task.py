"""A task with a fault that only runs on devices show.

``task_args``:

- ``cpu_targets``: compute the loss with targets that stay on the CPU.
- ``sleep_s``: rank 1 sleeps this long in its third call of the loss.
"""

import os
import time

from faulty_task import Faulty
from torch import nn


class DeviceTask(Faulty):
    def loss(self, model, batch):
        _, x, y = batch
        args = self.config.task_args
        self.calls += 1
        if args.get("sleep_s") and self.calls == 3 and int(os.environ.get("RANK", 0)) == 1:
            time.sleep(float(args["sleep_s"]))
        if args.get("cpu_targets"):
            y = y.cpu()
        return nn.functional.mse_loss(model(x), y, reduction="sum")

"""A callback: end the training when a time budget is used up, whatever the number of steps.

Run it from the parent folder: ``paceline sft examples/my_callback.yaml``.
"""

import time

import paceline


class TimeBudget(paceline.Callback):
    """Ends the training after ``task_args.max_minutes`` of training, over all attempts."""

    def __init__(self, config):
        super().__init__(config)
        self.max_s = 60.0 * float(config.task_args["max_minutes"])
        self.trained_s = 0.0

    def on_train_begin(self, info, state):
        self.last_time = time.monotonic()

    def on_step_end(self, result, state):
        now = time.monotonic()
        self.trained_s += now - self.last_time
        self.last_time = now
        if self.trained_s > self.max_s:
            self.request_stop(f"the training took {self.trained_s / 60:.1f} minutes")

    # A resumed run continues with the time that the earlier attempts took.
    def state_dict(self):
        return {"trained_s": self.trained_s}

    def load_state_dict(self, state):
        self.trained_s = state.get("trained_s", 0.0)

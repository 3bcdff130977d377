"""A callback with which torch raises an error if the host waits for the CUDA device."""

import torch

from paceline.train.callbacks.base import Callback

#: Steps that are watched: the first ones set up the optimizer and measure memory, and the last one
#: is logged.
FIRST, LAST = 4, 8


class WaitWatcher(Callback):
    def on_step_begin(self, state) -> None:
        if FIRST <= state.step < LAST:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, result, state) -> None:
        torch.cuda.set_sync_debug_mode("default")

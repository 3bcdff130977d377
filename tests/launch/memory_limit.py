"""A callback that lets a block run out of memory above `task_args.max_tokens` tokens."""

from typing import Any

import torch

import paceline
from paceline.distributed.timing.progress import PROGRESS


class MemoryLimit(paceline.Callback):
    """Raises the error of an allocator in the forward pass of each block.

    `task_args.phase`: `training` or `evaluation`; `task_args.from_step`: number of completed steps
    from which on there is a limit.
    """

    step = 0

    def on_train_begin(self, info, state):
        self.step = state.step
        for module in info.model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                module.register_forward_pre_hook(self._check, with_kwargs=True)

    def on_step_begin(self, state):
        self.step = state.step

    def _check(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        settings = self.config.task_args
        is_evaluation = PROGRESS.phase == "evaluation"
        if is_evaluation != (settings.get("phase") == "evaluation"):
            return
        num_tokens = hidden.shape[0] * hidden.shape[1]
        if self.step >= settings.get("from_step", 0) and num_tokens > settings["max_tokens"]:
            raise torch.OutOfMemoryError(f"out of memory: {num_tokens} tokens")

"""Callbacks that measure the memory of simulated devices, and limit it in some part of a run."""

import json
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import paceline

TRAINING, EVALUATION = "training", "evaluation"


class MemoryProbe(paceline.Callback):
    """Writes ``memory-RANK.json`` into the output folder: ``state``, the bytes before the update of
    the last step, which are the weights, the gradients and the optimizer's state; and the peaks of
    steps and of evaluations."""

    def on_train_begin(self, info, state):
        self.path = info.output_dir / f"memory-{info.rank}.json"
        self.sizes = {"state": 0, TRAINING: 0, EVALUATION: 0}
        self.is_in_step = False
        register_optimizer_step_pre_hook(self._note_state)
        torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, state):
        self.is_in_step = True

    def _note_state(self, optimizer, args, kwargs):
        if self.is_in_step:  # before the first of several optimizers
            self.sizes["state"] = torch.cuda.memory_allocated()
        self.is_in_step = False

    def on_step_end(self, result, state):
        self._note_peak(TRAINING)

    def on_evaluation_end(self, result, state):
        self._note_peak(EVALUATION)

    def _note_peak(self, name):
        self.sizes[name] = max(self.sizes[name], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, state):
        self.path.write_text(json.dumps(self.sizes))


def read_sizes(folder: Path) -> list[dict[str, int]]:
    """Return what :class:`MemoryProbe` has written, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("memory-*.json"))]


class MemoryLimit(paceline.Callback):
    """Leaves a part of the device's memory to the run, as if another process held the rest.

    ``task_args.limit_bytes``: the part; ``task_args.from_step``: number of completed steps from
    which on there is a limit, by default from the start, before the largest micro-batch is tried;
    ``task_args.phase``: ``evaluation`` to limit only what follows a step.
    """

    def __init__(self, config):
        super().__init__(config)
        self.settings = config.task_args
        self.in_evaluation = self.settings.get("phase") == EVALUATION
        self._set_limit(not self.in_evaluation and not self.settings.get("from_step"))

    def _set_limit(self, is_limited):
        _, total = torch.cuda.mem_get_info()
        fraction = self.settings["limit_bytes"] / total if is_limited else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction)

    def on_step_begin(self, state):
        has_begun = state.step >= self.settings.get("from_step", 0)
        self._set_limit(has_begun and not self.in_evaluation)

    def before_pause(self, state):
        if self.in_evaluation:
            self._set_limit(True)

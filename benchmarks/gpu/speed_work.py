"""The work of the speed runs: the model with random weights, the rows, and the figures that are
computed in the same way for all contenders."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Skipped
from context import Context

#: Steps before the measured ones, which include compilation; measured steps; profiled steps.
NUM_WARM_UP, NUM_MEASURED, NUM_PROFILED = 3, 8, 2
LEARNING_RATE, LORA_RANK = 1e-5, 16


@dataclass(frozen=True)
class SpeedWork:
    """A model, and rows of equal length that every contender trains on in the same order.

    Args:
        rows: token ids, int64 [rows, tokens]; labels: the same with -100 where there is no loss.
        batch_rows: rows of a micro-batch, which is a step.
    """

    model: Path
    settings: dict[str, Any]
    rows: torch.Tensor
    labels: torch.Tensor
    batch_rows: int

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        indices = [(step * self.batch_rows + row) % len(self.rows) for row in
                   range(self.batch_rows)]  # fmt: skip
        return self.rows[indices], self.labels[indices]

    @property
    def tokens_per_step(self) -> int:
        return self.batch_rows * self.rows.shape[1]

    def mfu(self, step_s: float) -> float | None:
        """Return the model FLOPs utilization by the formula of the `step` event."""
        from paceline.config.load import load_config
        from paceline.models.shape.dims import dims_of
        from paceline.observe.throughput import ModelFlops
        from paceline.planner.devices import peak_rate

        properties = torch.cuda.get_device_properties(0)
        peak = peak_rate(properties.name, properties.total_memory, "bfloat16")
        dims = dims_of(json.loads((self.model / "config.json").read_text()))
        if dims is None or peak is None:
            return None
        config = load_config(None, self.settings).config
        # All rows have the same length, which is therefore the mean length of a token's sample.
        flops = ModelFlops(dims, config, float(self.rows.shape[1]), 1, peak)
        labels = float((self.labels[:, 1:] != -100).sum()) / len(self.rows) * self.batch_rows
        return flops.utilization(flops.per_device(labels, self.tokens_per_step) / step_s)

    def figures(self, step_s: float, peak_bytes: int, trace: Path | None) -> dict[str, Any]:
        """Return the figures of a contender.

        Args:
            step_s: mean seconds of a measured step.
        """
        result = {
            "tokens_s": self.tokens_per_step / step_s,
            "mfu": self.mfu(step_s),
            "step_s": step_s,
            "peak_bytes": peak_bytes,
        }
        return result | (kernel_figures(trace, NUM_PROFILED) if trace is not None else {})


def make_work(
    context: Context, config_file: str, lora: bool, batch_rows: int, row_tokens: int
) -> SpeedWork:
    """Return the work; write the model at the first call of a benchmark.

    Args:
        config_file: `config.json` of the model, or a folder with a model.
    """
    from paceline.config.load import load_config
    from paceline.data.encoding.prepare import prepare_tokens
    from paceline.data.text.token_dataset import TokenDataset
    from paceline.models.builtin import resolve_model

    model = Path(config_file)
    if model.is_file():
        model = write_model(context, model)
    settings: dict[str, Any] = {
        "model": str(model),
        "dataset": str(context.prepared / "data" / "long-rows.jsonl"),
        "max_length": row_tokens,
        "per_device_train_batch_size": batch_rows,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "shuffle": False,
        "max_steps": NUM_WARM_UP + NUM_MEASURED + NUM_PROFILED,
        "parallel.mode": "single",
        **({"lora.enable": True, "lora.rank": LORA_RANK, "lora.dropout": 0} if lora else {}),
    }
    prepared = prepare_tokens(load_config(None, settings).config, "sft", resolve_model)
    tokens = TokenDataset(prepared.train_folder, prepared.train_indices)
    samples = [tokens[index] for index in range(len(tokens))]
    rows = torch.tensor(np.stack([sample["input_ids"] for sample in samples])).long()
    if rows.shape[1] != row_tokens:
        raise AssertionError(f"rows of {rows.shape[1]} tokens instead of {row_tokens}")
    masks = torch.tensor(np.stack([sample["labels_mask"] for sample in samples])).bool()
    return SpeedWork(model, settings, rows, rows.masked_fill(~masks, -100), batch_rows)


def write_model(context: Context, config: Path) -> Path:
    """Write a model with random weights in bfloat16, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = context.scratch.parents[1] / "models" / config.stem
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(context.prepared / "models" / "tokenizer", folder)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    (folder / "complete").touch()
    return folder


def kernel_figures(trace: Path, num_steps: int) -> dict[str, Any]:
    """Return the kernels per step and the busy share of the device from a trace of torch's
    profiler. Busy is the union of the times of kernels and copies."""
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in kinds and "dur" in event
    )
    if not work:
        return {}
    busy, end = 0.0, work[0][0]
    for start, stop in work:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    kernels = sum(event.get("cat") == "kernel" for event in events)
    return {
        "kernels_per_step": kernels / num_steps,
        "busy_share": busy / (end - work[0][0]),
    }


def skip_unless_planned(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the memory and the time that the plan predicts on this device; skip the case if the
    plan says that the run does not fit."""
    import paceline

    plan = paceline.plan(settings)
    (mode,) = (each for each in plan["modes"] if each["mode"] == "single")
    if not mode["fits"]:
        needed = mode["memory_bytes"]["total"] / 2**30
        raise Skipped(
            f"the plan says that it does not fit: {needed:.1f} GiB of"
            f" {plan['device_memory_bytes'] / 2**30:.1f} GiB"
        )
    return {"planned_bytes": mode["memory_bytes"]["total"]}


class StepClock:
    """Measures the steps of every contender in the same way: from the end of the warm-up to the end
    of the measured steps, with the device idle at both, and without a wait in between.

    Args:
        synchronize: function that waits for the device.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self._started_at = self._ended_at = 0.0

    def after_step(self, num_steps: int) -> None:
        """Record that this many steps have been made."""
        if num_steps == NUM_WARM_UP:
            self._synchronize()
            self._started_at = time.perf_counter()
        elif num_steps == NUM_WARM_UP + NUM_MEASURED:
            self._synchronize()
            self._ended_at = time.perf_counter()

    @property
    def step_s(self) -> float:
        """Mean seconds of a measured step."""
        if not self._ended_at > self._started_at > 0.0:
            raise RuntimeError("the measured steps were not made")
        return (self._ended_at - self._started_at) / NUM_MEASURED


def measure(
    step: Callable[[int], Any], folder: Path, synchronize: Callable[[], Any]
) -> tuple[float, Path]:
    """Run the steps of a hand-written loop; return the mean seconds of a measured step, and a trace
    of the profiled ones."""
    from torch.profiler import profile

    clock = StepClock(synchronize)
    for number in range(NUM_WARM_UP + NUM_MEASURED):
        step(number)
        clock.after_step(number + 1)
    with profile() as profiler:  # of all activities that this build of torch supports
        for number in range(NUM_PROFILED):
            step(NUM_WARM_UP + NUM_MEASURED + number)
        synchronize()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return clock.step_s, path

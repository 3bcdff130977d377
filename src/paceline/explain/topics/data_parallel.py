"""`paceline explain data-parallel`: a real step of one process that controls several devices with
threads, with the inputs, outputs and gradients of each device."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    Span,
    Tone,
    cells_of,
    on_step_clock,
)
from paceline.launch.fork_server import OPTIMIZER_MODULE
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = (
    "paceline.explain.training",
    "paceline.strategies.data_parallel.strategy",
    OPTIMIZER_MODULE,
)
_WARM_UP_STEPS = 3
_SHOWN = 4  # values of each tensor
_ROWS = ("weights", "inputs", "outputs", "gradients")
_ABOUT = (
    "Data parallel with threads: one process controls all devices. Device 0 sends its weights to"
    " the others before each step and receives all gradients after it, so all traffic goes through"
    " device 0 while the others wait. DDP computes the same gradients without this bottleneck. The"
    f" first {_SHOWN} values of each tensor are shown."
)


@dataclass
class DeviceValues:
    """The first values of each tensor of a device in the recorded step."""

    weights: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ThreadedStep:
    """The recording of a step.

    Args:
        spans: spans, whose actors are devices.
        copied_bytes: bytes of the copies of weights and of gradients between two devices.
        counted_bytes: bytes of all copies, by the traffic counter.
        summed, updated: first gradients and weights of device 0 after their sum and the update.
    """

    spans: list[Span]
    devices: list[DeviceValues]
    copied_bytes: tuple[int, int]
    counted_bytes: int
    summed: list[float]
    updated: list[float]
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training.

    The figures: ``ranks`` (devices), ``devices`` (first values of each tensor), ``summed``,
    ``updated`` (first gradients and weights of device 0 at the end) and ``copied_bytes`` (between
    devices, per step).
    """
    step: ThreadedStep = run_on_ranks(_record_step, 1, options.ranks)[0]
    spans, _ = on_step_clock(step.spans)
    frames = _frames(step, spans)
    sums = [sum(values) for values in zip(*(d.gradients for d in step.devices), strict=True)]
    return Recording(
        topic="data-parallel",
        title=f"Data parallel: one step of one process on {counted(options.ranks, 'device')}",
        about=_ABOUT,
        actors=tuple(f"device {number}" for number in range(options.ranks)),
        frames=frames,
        checks=(
            # One process has one counter.
            Check.equal(
                "bytes copied between devices",
                sum(message.size_bytes for frame in frames for message in frame.messages),
                step.counted_bytes,
            ),
            Check(
                "the sum of the devices' gradients is that of device 0",
                sums,
                step.summed,
                all(
                    abs(total - value) <= 1e-4 * abs(value) + 1e-9
                    for total, value in zip(sums, step.summed, strict=True)
                ),
            ),
            Check.equal("gradients equal those of one process", True, step.is_correct),
        ),
        facts=(
            ("Through device 0 per step", human_bytes(step.counted_bytes)),
            ("Step", f"{1000 * max(span.end_s for span in spans):.1f} ms"),
        ),
        spans=tuple(spans),
        figures={
            "ranks": options.ranks,
            "devices": [vars(device) for device in step.devices],
            "summed": step.summed,
            "updated": step.updated,
            "copied_bytes": step.counted_bytes,
        },
    )


def _frames(step: ThreadedStep, spans: list[Span]) -> tuple[Frame, ...]:
    def end_s(kind: str) -> float:
        return max(span.end_s for span in spans if span.kind == kind)

    others = range(1, len(step.devices))
    weights_bytes, gradients_bytes = step.copied_bytes
    copies = tuple(DrawnMessage(0, device, "weights", weights_bytes) for device in others)
    returns = tuple(DrawnMessage(device, 0, "gradients", gradients_bytes) for device in others)
    start_s = min(span.start_s for span in spans if span.kind == "forward")
    return (
        Frame(
            "Each device has its part of the batch. Only device 0 has the current weights.",
            _rows(step, {"inputs": ""}, ["weights", "inputs"]),
            time_s=0.0,
        ),
        Frame(
            "Device 0 copies its weights to every other device, in each step.",
            _rows(step, {"weights": "new", "inputs": ""}),
            messages=copies,
            time_s=start_s,
            is_key=True,
        ),
        Frame(
            "Each device runs forward on its inputs, in its own thread.",
            _rows(step, {"weights": "", "inputs": "", "outputs": "new"}),
            time_s=end_s("forward"),
            is_key=True,
        ),
        Frame(
            "Each device runs backward: the gradients differ, because the inputs do.",
            _rows(step, {"weights": "", "inputs": "", "outputs": "", "gradients": "new"}),
            time_s=end_s("backward"),
            is_key=True,
        ),
        Frame(
            "Device 0 receives all gradients and sums them. The other devices are idle.",
            _rows(step, dict.fromkeys(_ROWS, ""), summed=True),
            messages=returns,
            time_s=end_s("sum gradients"),
            is_key=True,
        ),
        Frame(
            "Only device 0 applies the update. The weights of the others are now out of date.",
            _rows(step, dict.fromkeys(_ROWS, ""), summed=True, updated=True),
            time_s=end_s("update"),
            is_key=True,
        ),
    )


def _rows(
    step: ThreadedStep,
    tones: dict[str, Tone],
    on_device0: list[str] | None = None,
    summed: bool = False,
    updated: bool = False,
) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return the rows of each device.

    Args:
        tones: rows that have values, and how these are marked.
        on_device0: rows that have values on device 0, if they differ.
    """
    rows = []
    for number, device in enumerate(step.devices):
        shown = []
        for name in _ROWS:
            values: list[float] = getattr(device, name)
            tone = tones.get(name)
            if number == 0 and on_device0 and name in on_device0:
                tone = ""
            if number == 0 and name == "gradients" and summed:
                values, tone = step.summed, "done"
            if number == 0 and name == "weights" and updated:
                values, tone = step.updated, "done"
            empty = tuple(Cell("", tone="idle") for _ in range(_SHOWN))
            shown.append(DrawnRow(name, empty if tone is None else cells_of(values, tone)))
        rows.append(tuple(shown))
    return tuple(rows)


def _record_step(world: Communicator, devices: int) -> ThreadedStep:
    from torch.utils.hooks import RemovableHandle

    from paceline.explain import training
    from paceline.strategies.data_parallel.strategy import ThreadedDPStrategy

    spans: list[Span] = []
    values = [DeviceValues() for _ in range(devices)]
    lock = threading.Lock()

    def add_span(device: int, kind: str, start_s: float) -> None:
        """Add a span that ends now."""
        end_s = time.perf_counter()
        with lock:
            spans.append(Span(device, "thread", kind, kind, start_s, end_s))

    class TimedStrategy(ThreadedDPStrategy):
        def _send_weights(self) -> None:
            start_s = time.perf_counter()
            super()._send_weights()
            add_span(0, "copy weights", start_s)

        def _sum_gradients(self) -> None:
            for device, replica in zip(values, self.replicas, strict=True):
                device.gradients = _first(next(replica.parameters()).grad)
            start_s = time.perf_counter()
            super()._sum_gradients()
            add_span(0, "sum gradients", start_s)

    strategy = TimedStrategy(training.make_config("dp"), world)
    strategy.num_devices = devices
    model = training.make_model()
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batches = [training.make_batch(number) for number in range(devices)]
    handles: list[RemovableHandle] = []

    def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
        first = next(module.parameters())
        values[number].weights, values[number].inputs = _first(first), _first(batches[number])
        start_s = time.perf_counter()
        output = module(batches[number])
        loss: torch.Tensor = output.square().mean() / devices
        add_span(number, "forward", start_s)
        values[number].outputs = _first(output)
        end_s = time.perf_counter()
        # Backward computes the first layer's gradient last.
        handles.append(
            first.register_post_accumulate_grad_hook(lambda _: add_span(number, "backward", end_s))
        )
        return loss

    is_correct = True
    for number in range(_WARM_UP_STEPS + 1):
        spans.clear()
        before = world.traffic.total
        strategy.forward_backward(micro_step, devices)
        counted_bytes = world.traffic.total - before
        for handle in handles:
            handle.remove()
        handles.clear()
        if number == 0:
            is_correct = training.has_reference_gradients(model, devices)
        summed = _first(next(model.parameters()).grad)
        start_s = time.perf_counter()
        optimizer.step()
        add_span(0, "update", start_s)
    parameters = list(model.parameters())
    size_bytes = sum(parameter.nbytes for parameter in parameters)
    updated = _first(parameters[0])
    return ThreadedStep(
        spans, values, (size_bytes, size_bytes), counted_bytes, summed, updated, is_correct
    )


def _first(tensor: torch.Tensor | None) -> list[float]:
    """Return the first values of a tensor."""
    assert tensor is not None
    values: list[float] = tensor.detach().reshape(-1)[:_SHOWN].tolist()
    return values

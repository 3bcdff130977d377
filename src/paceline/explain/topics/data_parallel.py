"""`paceline explain data-parallel`: a real step of one process that controls several devices with
threads, with the inputs, outputs and gradients of each device."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.files import human_bytes
from paceline.explain import training
from paceline.explain.rank_topic import RankTopic, numbers_of
from paceline.explain.record import (
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Span,
    Tone,
    cells_of,
    idle_cells,
    on_step_clock,
)
from paceline.messages.pages import PageText
from paceline.strategies.data_parallel.strategy import ThreadedDPStrategy

_WARM_UP_STEPS = 3
_SHOWN = 4  # values of each tensor
_ROWS = ("weights", "inputs", "outputs", "gradients")
_ABOUT = PageText(
    "Data parallel with threads: one process controls all devices. Device 0 sends its weights to"
    " the others before each step and receives all gradients after it, so all traffic goes"
    " through device 0 while the others wait. DDP computes the same gradients without this"
    " bottleneck. The first {shown} values of each tensor are shown.",
    shown=_SHOWN,
)


@dataclass
class DeviceValues:
    """The first values of each tensor of a device in the recorded step."""

    weights: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)


class TimedStrategy(ThreadedDPStrategy):
    """Records the spans of a step, whose actors are devices, and the gradients of each device."""

    def __init__(self, *args: Any, devices: list[DeviceValues]) -> None:
        super().__init__(*args)
        self.num_devices = len(devices)
        self.spans: list[Span] = []
        self._devices = devices
        self._lock = threading.Lock()

    def add_span(self, device: int, kind: str, start_s: float) -> None:
        """Add a span that ends now."""
        end_s = time.perf_counter()
        with self._lock:
            self.spans.append(Span(device, "thread", kind, kind, start_s, end_s))

    def _send_weights(self) -> None:
        start_s = time.perf_counter()
        super()._send_weights()
        self.add_span(0, "copy weights", start_s)

    def _sum_gradients(self) -> None:
        for device, replica in zip(self._devices, self.replicas, strict=True):
            device.gradients = _first(next(replica.parameters()).grad)
        start_s = time.perf_counter()
        super()._sum_gradients()
        self.add_span(0, "sum gradients", start_s)


class ThreadsTopic(RankTopic):
    """Record a step of a small training in one process.

    The figures: ``ranks`` (devices), ``devices`` (first values of each tensor), ``summed``,
    ``updated`` (first gradients and weights of device 0 at the end) and ``copied_bytes`` (between
    devices, per step).

    Attributes:
        model_bytes: bytes of the weights, and of the gradients, that are copied between devices.
    """

    about = _ABOUT

    def run(self) -> None:
        num_devices = self.options.ranks
        self.devices = [DeviceValues() for _ in range(num_devices)]
        strategy = TimedStrategy(training.make_config("dp"), self.world, devices=self.devices)
        model = training.make_model()
        strategy.setup(model)
        optimizer = strategy.setup_optimizer(training.build_adamw)
        batches = [training.make_batch(number) for number in range(num_devices)]
        handles: list[RemovableHandle] = []

        def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
            first, device = next(module.parameters()), self.devices[number]
            device.weights, device.inputs = _first(first), _first(batches[number])
            start_s = time.perf_counter()
            output = module(batches[number])
            loss: torch.Tensor = output.square().mean() / num_devices
            strategy.add_span(number, "forward", start_s)
            device.outputs = _first(output)
            end_s = time.perf_counter()
            # Backward computes the first layer's gradient last.
            handles.append(
                first.register_post_accumulate_grad_hook(
                    lambda _: strategy.add_span(number, "backward", end_s)
                )
            )
            return loss

        for number in range(_WARM_UP_STEPS + 1):
            strategy.spans.clear()
            self.counted_bytes = 0
            with self.count_traffic():
                strategy.forward_backward(micro_step, num_devices)
            while handles:
                handles.pop().remove()
            if number == 0:
                self.is_correct = training.has_reference_gradients(
                    dict(model.named_parameters()), num_devices
                )
            self.summed = _first(next(model.parameters()).grad)
            start_s = time.perf_counter()
            optimizer.step()
            strategy.add_span(0, "update", start_s)
        self.model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.updated = _first(next(model.parameters()))
        self.spans, _ = on_step_clock(strategy.spans)
        self.title = PageText(
            "Data parallel: one step of one process on {devices:device}", devices=num_devices
        )
        self.actors = [PageText("device {number}", number=number) for number in range(num_devices)]

    def frames(self) -> Iterator[Frame]:
        others, size_bytes = range(1, len(self.devices)), self.model_bytes
        start_s = min(span.start_s for span in self.spans if span.kind == "forward")
        rows = [dict.fromkeys(_ROWS, idle_cells(_SHOWN)) for _ in self.devices]

        def show(name: str, tone: Tone = "") -> None:
            for row, device in zip(rows, self.devices, strict=True):
                row[name] = cells_of(getattr(device, name), tone)

        def frame(caption: str, time_s: float, is_key: bool = True, **settings: Any) -> Frame:
            drawn = tuple(
                tuple(DrawnRow(name, cells) for name, cells in row.items()) for row in rows
            )
            return Frame(caption, drawn, time_s=time_s, is_key=is_key, **settings)

        show("inputs")
        rows[0]["weights"] = cells_of(self.devices[0].weights)
        yield frame(
            "Each device has its part of the batch. Only device 0 has the current weights.",
            time_s=0.0,
            is_key=False,
        )
        show("weights", "new")
        yield frame(
            "Device 0 copies its weights to every other device, in each step.",
            time_s=start_s,
            messages=tuple(DrawnMessage(0, device, "weights", size_bytes) for device in others),
        )
        show("weights")
        show("outputs", "new")
        yield frame(
            "Each device runs forward on its inputs, in its own thread.",
            time_s=self._end_s("forward"),
        )
        show("outputs")
        show("gradients", "new")
        yield frame(
            "Each device runs backward: the gradients differ, because the inputs do.",
            time_s=self._end_s("backward"),
        )
        show("gradients")
        rows[0]["gradients"] = cells_of(self.summed, "done")
        yield frame(
            "Device 0 receives all gradients and sums them. The other devices are idle.",
            time_s=self._end_s("sum gradients"),
            messages=tuple(DrawnMessage(device, 0, "gradients", size_bytes) for device in others),
        )
        rows[0]["weights"] = cells_of(self.updated, "done")
        yield frame(
            "Only device 0 applies the update. The weights of the others are now out of date.",
            time_s=self._end_s("update"),
        )

    def _end_s(self, kind: str) -> float:
        return max(span.end_s for span in self.spans if span.kind == kind)

    def check_frames(self, frames: Sequence[Frame]) -> list[Check]:
        gradients = zip(*(device.gradients for device in self.devices), strict=True)
        sums = [sum(values) for values in gradients]
        return [
            # One process has one counter.
            Check.equal(
                "bytes copied between devices",
                sum(message.size_bytes for frame in frames for message in frame.messages),
                self.counted_bytes,
            ),
            Check(
                "the sum of the devices' gradients is device 0's gradient",
                sums,
                self.summed,
                all(
                    abs(total - value) <= 1e-4 * abs(value) + 1e-9
                    for total, value in zip(sums, self.summed, strict=True)
                ),
            ),
            Check.equal("gradients equal the gradients of one process", True, self.is_correct),
        ]

    def facts(self) -> dict[str, str]:
        return {
            "Through device 0 per step": human_bytes(self.counted_bytes),
            "Step": f"{1000 * max(span.end_s for span in self.spans):.1f} ms",
        }

    def add_figures(self) -> None:
        self.figures.update(
            devices=[vars(device) for device in self.devices],
            summed=self.summed,
            updated=self.updated,
            copied_bytes=self.counted_bytes,
        )


def _first(tensor: torch.Tensor | None) -> list[float]:
    """Return the first values of a tensor."""
    return numbers_of(tensor)[:_SHOWN]

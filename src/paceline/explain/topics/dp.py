"""`paceline explain dp`: the timeline of a real step of one process that controls several devices
with threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain import timeline
from paceline.explain.run import ExplainOptions, Recording
from paceline.explain.timeline import Span
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.parallel.ddp.threads", "torch._dynamo")
_WARM_UP_STEPS = 3
_COLORS = {
    "copy weights": "var(--c2)",
    "forward": "var(--c3)",
    "backward": "var(--c1)",
    "sum gradients": "var(--c4)",
    "update": "var(--c5)",
}
_CAPTIONS = {
    "copy weights": "Device 0 copies its weights to every other device in each step.",
    "forward": "Each device runs forward on its part of the batch, in its own thread.",
    "backward": "Each device runs backward and stores its gradients.",
    "sum gradients": "Device 0 receives all gradients and sums them. The other devices are idle.",
    "update": "Only device 0 applies the update.",
}
_ABOUT = (
    "Data parallel with threads: one process controls all devices. Device 0 sends its weights to"
    " the others before each step and receives all gradients after it, so all traffic goes through"
    " device 0 while the others wait. DDP computes the same gradients without this bottleneck."
)


@dataclass(frozen=True)
class ThreadedStep:
    """The recording of a step. ``rank`` of a span: the device. ``copied_bytes``: between
    devices."""

    spans: list[Span]
    copied_bytes: int
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training.

    The content: ``topic, ranks`` (devices), ``spans`` (seconds from the start of the step; ``rank``
    is the device), ``copied_bytes`` (between devices, per step) and ``result_ok`` (the gradients
    equal those of one process).
    """
    step: ThreadedStep = run_on_ranks(_record_step, 1, options.ranks)[0]
    spans, copied = step.spans, human_bytes(step.copied_bytes)
    timeline.on_step_clock(spans)
    moments = [(0.0, "The step starts.")]
    for kind, caption in _CAPTIONS.items():
        moments.append((max(span["end"] for span in spans if span["kind"] == kind), caption))
    moments.sort()
    title = f"DP: one step of one process on {counted(options.ranks, 'device')}"
    label, verdict = timeline.gradients_fact(step.is_correct)
    row_names = [f"device {number}" for number in range(options.ranks)]
    rows = [span["rank"] for span in spans]
    return Recording(
        title=title,
        about=_ABOUT,
        is_correct=step.is_correct,
        facts=[
            ("Devices", str(options.ranks)),
            timeline.step_fact(spans),
            ("Through device 0 per step", copied),
            (label, verdict),
        ],
        lines=[
            title,
            _ABOUT,
            "",
            *(_span_line(span) for span in sorted(spans, key=lambda span: span["start"])),
            "",
            f"through device 0 per step: {copied}",
            f"{label.lower()}: {verdict}",
        ],
        captions=timeline.captions(moments),
        player=timeline.player(spans, options.ranks, moments, row_names, rows, _COLORS),
        content={
            "topic": "dp",
            "ranks": options.ranks,
            "spans": spans,
            "copied_bytes": step.copied_bytes,
            "result_ok": step.is_correct,
        },
    )


def _span_line(span: Span) -> str:
    start, end = 1000 * span["start"], 1000 * span["end"]
    return f"{start:8.2f} – {end:8.2f} ms  device {span['rank']}: {span['kind']}"


def _record_step(world: Communicator, devices: int) -> ThreadedStep:
    import torch
    from torch.utils.hooks import RemovableHandle

    from paceline.explain import training
    from paceline.parallel.ddp.threads import ThreadedDPStrategy

    spans: list[Span] = []
    lock = threading.Lock()

    def record_span(device: int, kind: str, start: float) -> None:
        """Add a span that ends now."""
        end = time.perf_counter()
        with lock:
            spans.append(
                Span(lane="thread", kind=kind, label=kind, start=start, end=end, rank=device)
            )

    class TimedStrategy(ThreadedDPStrategy):
        def _send_weights(self) -> None:
            start = time.perf_counter()
            super()._send_weights()
            record_span(0, "copy weights", start)

        def _sum_gradients(self) -> None:
            start = time.perf_counter()
            super()._sum_gradients()
            record_span(0, "sum gradients", start)

    strategy = TimedStrategy(training.make_config("dp"), world)
    strategy.num_devices = devices
    model = training.make_model()
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batches = [training.make_batch(number) for number in range(devices)]
    handles: list[RemovableHandle] = []

    def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
        start = time.perf_counter()
        loss = training.loss_of(module, batches[number], devices)
        record_span(number, "forward", start)
        end = time.perf_counter()
        # Backward computes the first layer's gradient last.
        first = next(module.parameters())
        handles.append(
            first.register_post_accumulate_grad_hook(lambda _: record_span(number, "backward", end))
        )
        return loss

    is_correct = True
    copied_bytes = 0
    for number in range(_WARM_UP_STEPS + 1):
        spans.clear()
        before = world.traffic.total
        strategy.forward_backward(micro_step, devices)
        copied_bytes = world.traffic.total - before
        for handle in handles:
            handle.remove()
        handles.clear()
        if number == 0:
            is_correct = training.has_reference_gradients(model, devices)
        start = time.perf_counter()
        optimizer.step()
        record_span(0, "update", start)
    return ThreadedStep(spans, copied_bytes, is_correct)

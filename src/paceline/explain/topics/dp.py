"""`paceline explain dp`: one process that drives several devices by threads, from a real step's
clock."""

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
    "copy weights": "Device 0 copies its weights to every other device, each step anew.",
    "forward": "Each device runs forward on its part of the batch, a thread each.",
    "backward": "Each device runs backward; its gradients stay where they are.",
    "sum gradients": (
        "All gradients come to device 0, which adds them up. The others have nothing to do."
    ),
    "update": "Device 0 alone makes the update.",
}
_ABOUT = (
    "Data parallel by threads: one process drives all devices. Device 0 hands its weights out"
    " before each step and gathers every gradient after it, so all traffic goes through it, and"
    " the others wait. DDP gives the same gradients without that bottleneck."
)


@dataclass(frozen=True)
class ThreadedStep:
    """A step as it was recorded. ``rank`` of a span: the device. ``copied_bytes``: between
    devices."""

    spans: list[Span]
    copied_bytes: int
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training.

    The content: ``topic, ranks`` (devices), ``spans`` (seconds from the start of the step; ``rank``
    is the device), ``copied_bytes`` (between devices, in a step) and ``result_ok`` (the gradients
    are those of one process).
    """
    step: ThreadedStep = run_on_ranks(_record_step, 1, options.ranks)[0]
    spans, copied = step.spans, human_bytes(step.copied_bytes)
    timeline.on_step_clock(spans)
    moments = [(0.0, "The step begins.")]
    for kind, caption in _CAPTIONS.items():
        moments.append((max(span["end"] for span in spans if span["kind"] == kind), caption))
    moments.sort()
    title = f"DP: one step of one process on {counted(options.ranks, 'device')}"
    label, verdict = timeline.gradients_fact(step.is_correct)
    lanes = [f"device {number}" for number in range(options.ranks)]
    lane_numbers = [span["rank"] for span in spans]
    return Recording(
        title=title,
        about=_ABOUT,
        is_correct=step.is_correct,
        facts=[
            ("Devices", str(options.ranks)),
            timeline.step_fact(spans),
            ("Through device 0 in a step", copied),
            (label, verdict),
        ],
        lines=[
            title,
            _ABOUT,
            "",
            *(_span_line(span) for span in sorted(spans, key=lambda span: span["start"])),
            "",
            f"through device 0 in a step: {copied}",
            f"{label.lower()}: {verdict}",
        ],
        captions=timeline.captions(moments),
        player=timeline.player(spans, options.ranks, moments, lanes, lane_numbers, _COLORS),
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

    def note(device: int, kind: str, start: float) -> None:
        """Add a span that ends now."""
        end = time.perf_counter()
        with lock:
            spans.append(
                Span(lane="thread", kind=kind, label=kind, start=start, end=end, rank=device)
            )

    class Watched(ThreadedDPStrategy):
        def _send_weights(self) -> None:
            start = time.perf_counter()
            super()._send_weights()
            note(0, "copy weights", start)

        def _sum_gradients(self) -> None:
            start = time.perf_counter()
            super()._sum_gradients()
            note(0, "sum gradients", start)

    strategy = Watched(training.make_config("dp"), world)
    strategy.num_devices = devices
    model = training.make_model()
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batches = [training.make_batch(number) for number in range(devices)]
    handles: list[RemovableHandle] = []

    def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
        start = time.perf_counter()
        loss = training.loss_of(module, batches[number], devices)
        note(number, "forward", start)
        end = time.perf_counter()
        # The first layer's gradient is the last to come.
        first = next(module.parameters())
        handles.append(
            first.register_post_accumulate_grad_hook(lambda _: note(number, "backward", end))
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
        note(0, "update", start)
    return ThreadedStep(spans, copied_bytes, is_correct)

"""`paceline explain dp`: one process that drives several devices by threads, from a real step's
clock."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain import timeline
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator
    from paceline.explain.run import ExplainOptions

Story = dict[str, Any]

PRELOAD = ("paceline.explain.training", "paceline.parallel.ddp.threads", "torch._dynamo")
_WARM_UP_STEPS = 3
_COLOURS = {
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


def tell(options: ExplainOptions) -> Story:
    """A step of a small training.

    Returns: ``topic, ranks`` (devices), ``spans`` (seconds from the start of the step; ``rank`` is
    the device), ``copied_bytes`` (between devices, in a step) and ``result_ok`` (the gradients are
    those of one process).
    """
    found = run_on_ranks(_record, 1, options.ranks)[0]
    begin = min(span["start"] for span in found["spans"])
    return {
        "topic": "dp",
        "ranks": options.ranks,
        "spans": timeline.in_order(timeline.shifted(found["spans"], begin)),
        "copied_bytes": found["copied_bytes"],
        "result_ok": found["ok"],
    }


def _record(world: Communicator, devices: int) -> dict[str, Any]:
    from paceline.explain import training
    from paceline.parallel.ddp.threads import ThreadedDPStrategy

    spans: list[dict[str, Any]] = []
    lock = threading.Lock()

    def note(device: int, kind: str, start: float, end: float) -> None:
        with lock:
            spans.append(training.span("thread", kind, kind, start, end, rank=device))

    class Watched(ThreadedDPStrategy):
        def _send_weights(self) -> None:
            start = time.perf_counter()
            super()._send_weights()
            note(0, "copy weights", start, time.perf_counter())

        def _sum_gradients(self) -> None:
            start = time.perf_counter()
            super()._sum_gradients()
            note(0, "sum gradients", start, time.perf_counter())

    strategy = Watched(training.make_config("dp"), world)
    strategy.num_devices = devices
    model = training.make_model()
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batches = [training.make_batch(number) for number in range(devices)]

    def micro_step(number: int, module: Any) -> Any:
        start = time.perf_counter()
        loss = training.loss_of(module, batches[number], devices)
        begun = time.perf_counter()
        note(number, "forward", start, begun)
        ends[number] = begun
        # The first layer's gradient is the last to come.
        handle = next(module.parameters()).register_post_accumulate_grad_hook(
            lambda _: note(number, "backward", ends[number], time.perf_counter())
        )
        handles.append(handle)
        return loss

    ends: dict[int, float] = {}
    handles: list[Any] = []
    ok = True
    copied = 0
    for number in range(_WARM_UP_STEPS + 1):
        spans.clear()
        before = world.traffic.total
        strategy.forward_backward(micro_step, devices)
        copied = world.traffic.total - before
        for handle in handles:
            handle.remove()
        handles.clear()
        if number == 0:
            ok = training.as_reference(
                [one.grad for one in model.parameters() if one.grad is not None], devices
            )
        start = time.perf_counter()
        optimizer.step()
        note(0, "update", start, time.perf_counter())
    return {"spans": spans, "copied_bytes": copied, "ok": ok}


def title(story: Story) -> str:
    return f"DP: one step of one process on {counted(story['ranks'], 'device')}"


def about(story: Story) -> str:
    del story
    return (
        "Data parallel by threads: one process drives all devices. Device 0 hands its weights out"
        " before each step and gathers every gradient after it, so all traffic goes through it, and"
        " the others wait. DDP gives the same gradients without that bottleneck."
    )


def _moments(story: Story) -> list[tuple[float, str]]:
    found = [(0.0, "The step begins.")]
    for kind, caption in _CAPTIONS.items():
        ends = [span["end"] for span in story["spans"] if span["kind"] == kind]
        if ends:
            found.append((max(ends), caption))
    return sorted(found)


def facts(story: Story) -> list[tuple[str, str]]:
    return [
        ("Devices", str(story["ranks"])),
        timeline.step_fact(story),
        ("Through device 0 in a step", human_bytes(story["copied_bytes"])),
        timeline.gradients_fact(story),
    ]


def player(story: Story) -> dict[str, Any]:
    lanes = [f"device {number}" for number in range(story["ranks"])]
    bars = [{**span, "lane": span["rank"]} for span in story["spans"]]
    return timeline.player(story, _moments(story), lanes, bars, _COLOURS)


def text(story: Story) -> str:
    lines = [title(story), about(story), ""]
    for span in sorted(story["spans"], key=lambda one: one["start"]):
        lines.append(
            f"{1000 * span['start']:8.2f} – {1000 * span['end']:8.2f} ms  device {span['rank']}:"
            f" {span['kind']}"
        )
    lines += ["", f"through device 0 in a step: {human_bytes(story['copied_bytes'])}"]
    lines.append(timeline.gradients_line(story))
    return "\n".join(lines)

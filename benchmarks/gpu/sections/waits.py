"""The host waits for the device in no step, and streams do not race."""

import os
from pathlib import Path
from typing import Any

from cases import Case, Section
from configs import BF16, COMPILED, FP16, FULL, LORA, PADDED, complete
from context import Context
from training import train

WATCHER = Path(__file__).resolve().parents[3] / "tests" / "gpu" / "wait_watcher.py"
#: Steps that simulated devices check: the first ones set up the optimizer and measure memory, the
#: last one is logged.
NUM_STEPS, FIRST, LAST = 10, 4, 8
TRAININGS: dict[str, dict[str, Any]] = {
    "single bf16-mixed": BF16,
    "single fp16-mixed padded": FP16 | PADDED,
    "single full recomputation": BF16 | FULL,
    "ddp": BF16 | {"parallel.mode": "ddp"},
    "zero2 LoRA": BF16 | LORA | {"parallel.mode": "zero2"},
    "zero3": BF16 | {"parallel.mode": "zero3"},
    "single bf16-true": {"precision": "bf16-true"},
    "single compiled": BF16 | COMPILED,
}


def waits_section(is_simulated: bool) -> Section:
    """Return the section about waits."""
    why = "needs a GPU: the compiler generates code for GPUs" if is_simulated else ""
    cases = [
        Case(name, "sections.waits:train_without_waits", {"settings": complete(settings, 1)},
             limit_s=90, why_skipped=why if settings.get("torch_compile") else "")
        for name, settings in TRAININGS.items()
    ]  # fmt: skip
    return Section("waits", 50, cases)


def train_without_waits(context: Context, settings: dict[str, Any]) -> dict[str, Any]:
    """Train; on a GPU, torch raises an error at a wait (``set_sync_debug_mode``), and simulated
    devices record it."""
    settings = settings | {"max_steps": NUM_STEPS, "logging_steps": 100}
    if not context.is_simulated:
        train(context, "run", settings | {"callbacks": [f"{WATCHER}:WaitWatcher"]})
        return {"steps": LAST - FIRST}
    from synchronizations import VARIABLE, read_synchronizations

    records = context.scratch / "records"
    records.mkdir()
    os.environ[VARIABLE] = str(records)
    try:
        train(context, "run", settings)
    finally:
        del os.environ[VARIABLE]
    recorded = list(read_synchronizations(records))
    if not any(record.step == NUM_STEPS for record in recorded):
        raise AssertionError("the wait of the logged last step was not recorded")
    waits = [
        str(record)
        for record in recorded
        if record.step is not None and FIRST <= record.step < LAST and not record.is_late
    ]
    if waits:
        raise AssertionError(f"the host waits: {'; '.join(sorted(set(waits)))}")
    return {"steps": LAST - FIRST}


def sanitizer_section(is_simulated: bool) -> Section:
    """Return the section with torch's CUDA sanitizer."""
    why = "needs a GPU: the CPU build of torch reports no streams to the sanitizer"
    trainings = {
        "single": BF16,
        "single offloads": {"parallel.cpu_offload": ["optimizer", "activations"]},
        "ddp": BF16 | {"parallel.mode": "ddp"},
        "zero2": BF16 | {"parallel.mode": "zero2"},
        "zero3 LoRA": BF16 | LORA | {"parallel.mode": "zero3"},
    }
    cases = [Case("planted race is reported", "sections.waits:find_planted_race", limit_s=60)]
    cases += [
        Case(name, "sections.waits:train_with_sanitizer", {"settings": complete(settings, 1)},
             limit_s=90)
        for name, settings in trainings.items()
    ]  # fmt: skip
    if is_simulated:
        cases = [Case(each.name, each.function, why_skipped=why) for each in cases]
    return Section("sanitizer", 60, cases)


def find_planted_race(context: Context) -> dict[str, Any]:
    """Let two streams write to a tensor without waiting for each other."""
    import torch
    from torch.cuda import _sanitizer

    context.needs_gpu("the CPU build of torch reports no streams to the sanitizer")
    sanitizer = _sanitizer.CUDASanitizer()
    sanitizer.enable()
    try:
        values = torch.zeros(1 << 20, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            values.add_(1)
    except _sanitizer.CUDASanitizerErrors as errors:
        return {"errors": len(errors.errors)}
    finally:
        sanitizer.dispatch.__exit__(None, None, None)
        sanitizer.enabled = False
    raise AssertionError("the sanitizer did not report two streams that write to one tensor")


def train_with_sanitizer(context: Context, settings: dict[str, Any]) -> dict[str, Any]:
    """Train under the sanitizer, which raises an error at an access without synchronization."""
    from torch.cuda import _sanitizer

    context.needs_gpu("the CPU build of torch reports no streams to the sanitizer")
    sanitizer = _sanitizer.CUDASanitizer()
    sanitizer.enable()
    try:
        run = train(context, "run", settings)
    finally:
        sanitizer.dispatch.__exit__(None, None, None)
        sanitizer.enabled = False
    return {"losses": run.losses}

"""Resumed runs end with the bits of uninterrupted runs, and an asynchronous save is a snapshot."""

from pathlib import Path
from typing import Any

from cases import Case, Section
from configs import complete
from context import Context
from training import train

#: A constant learning rate: other schedules depend on `max_steps`.
DETERMINISTIC = {"deterministic": True, "save_total_limit": None}
NUM_STEPS, INTERRUPTED_AT = 6, 3
RESUMED: dict[str, dict[str, Any]] = {
    "single 32": {"precision": "32"},
    "single bf16-mixed, full recomputation": {
        "precision": "bf16-mixed", "gradient_checkpointing": "full",
    },
    "single fp16-mixed, padded": {"precision": "fp16-mixed", "packing": False},
    "single bf16-true": {"precision": "bf16-true"},
    "single LoRA with dropout": {
        "precision": "bf16-mixed", "lora.enable": True, "lora.dropout": 0.1,
    },
    "zero3 bf16-mixed": {"precision": "bf16-mixed", "parallel.mode": "zero3"},
}  # fmt: skip
TWO_RANKS: dict[str, dict[str, Any]] = {
    "ddp, 2 ranks": {"parallel.mode": "ddp"},
    "zero1, 2 ranks": {"parallel.mode": "zero1"},
    "zero3, 2 ranks": {"parallel.mode": "zero3"},
}


def section() -> Section:
    """Return the section."""
    cases = [
        Case(f"asynchronous save: {mode}", "sections.resume:save_asynchronously",
             {"settings": complete({"parallel.mode": mode}, 1)}, limit_s=60.0)
        for mode in ("single", "zero3")
    ]  # fmt: skip
    cases += [
        Case(f"resume: {name}", "sections.resume:resume", {"settings": complete(settings, ranks)},
             num_ranks=ranks, limit_s=60.0)
        for ranks, configs in ((1, RESUMED), (2, TWO_RANKS))
        for name, settings in configs.items()
    ]  # fmt: skip
    return Section("resume", 60, cases)


def resume(context: Context, settings: dict[str, Any], port: int | None = None) -> dict[str, Any]:
    """Check that an interrupted and an uninterrupted run end with the same bits in all weights."""
    settings = settings | DETERMINISTIC
    uninterrupted = train(context, "uninterrupted", settings | {"max_steps": NUM_STEPS}, port=port,
                  saves_state=True)  # fmt: skip
    for number, steps in enumerate((INTERRUPTED_AT, NUM_STEPS), start=1):
        resumed = train(
            context, "resumed", settings | {"max_steps": steps},
            port=None if port is None else port + number, saves_state=True,
            allow_config_change=True,
        )  # fmt: skip
    if context.rank > 0:
        return {}
    if resumed.report["resumed_from_step"] != INTERRUPTED_AT:
        raise AssertionError(f"resumed from step {resumed.report['resumed_from_step']}")
    _check_equal(resumed.digest(), uninterrupted.digest(), "the resumed run")
    return {"digest": uninterrupted.digest(), "loss": uninterrupted.losses[-1]}


def save_asynchronously(context: Context, settings: dict[str, Any]) -> dict[str, Any]:
    """Check that checkpoints that were written while training went on have the same bits as the
    checkpoints of a run that waited for each."""
    settings = settings | DETERMINISTIC | {"save_steps": 1, "max_steps": 8}
    runs = [
        train(context, name, settings | {"async_save": name == "asynchronous"}, saves_state=True)
        for name in ("asynchronous", "synchronous")
    ]
    for step in (1, 4, 8):
        first, second = (run.digest(step) for run in runs)
        _check_equal(first, second, f"the checkpoint of step {step}")
    blocked = [event["blocked_s"] for event in runs[0].events("checkpoint")]
    return {"blocked_s": sum(blocked) / len(blocked), "size_bytes": _size(runs[0].folder)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*.safetensors"))


def _check_equal(digest: str, expected: str, what: str) -> None:
    if digest != expected:
        raise AssertionError(f"{what} has the digest {digest[:16]}, expected {expected[:16]}")

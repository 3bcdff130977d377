"""Figures of short runs with known times, for tests of what is computed from them."""

from paceline.bench.short_runs import ShortRun, StepParts


def short_run(
    seconds: float,
    *,
    work: float = 1000.0,
    memory_bytes: int | None = 1 << 30,
    traffic_bytes: int | None = 0,
    first_step_s: float = 1.0,
    parts: StepParts | None = None,
) -> ShortRun:
    """Return a run of ten equal steps."""
    return ShortRun(
        step_s=(seconds,) * 10,
        work=work,
        unit="tokens",
        parts=parts,
        peak_memory_bytes=memory_bytes,
        traffic_bytes=traffic_bytes,
        first_step_s=first_step_s,
        losses=(2.0, 1.0),
        strategy="ddp",
        device="cpu",
        precision="32",
        world_size=2,
        global_batch_size=8,
        steps_per_epoch=100,
    )

"""What training a run for more steps does to its learning rate."""

from typing import TypedDict

from paceline.config.schema.schedules import schedule_share, warmup_length
from paceline.core.events import RunStartEvent, StepEvent
from paceline.core.formatting import finite
from paceline.web.files import as_object, as_text


class Continuation(TypedDict):
    """A run that continues. Unknown values are None.

    Args:
        step: the last step of the run, after which it continues.
        steps: the step at which it ends.
        schedule: the name of the learning rate schedule.
        before: the learning rate of the last step.
        after: the learning rate of the first step after it, by the schedule for ``steps`` steps.
        end: the learning rate of the last step.
    """

    step: int
    steps: int
    schedule: str | None
    before: float | None
    after: float | None
    end: float | None


def continuation(start: RunStartEvent, newest: StepEvent, steps: int) -> Continuation:
    """Return the learning rate before and after the point at which a run continues.

    Args:
        start: the newest ``run_start`` event of the run.
        newest: its newest ``step`` event.
        steps: the number of steps in all.
    """
    args = as_object(as_object(start.get("config")).get("train_args"))
    peak = finite(as_object(start.get("derived")).get("learning_rate"))
    step = int(finite(newest.get("step")) or 0)
    schedule = as_text(args.get("lr_scheduler_type"))
    if args.get("optim") == "schedule_free_adamw":
        schedule = "constant_with_warmup"

    def rate_at(at: int) -> float | None:
        ratio = finite(args.get("warmup_ratio")) or 0.0
        warmup = warmup_length(finite(args.get("warmup_steps")), ratio, steps)
        kwargs = as_object(args.get("lr_scheduler_kwargs"))
        share = None
        if schedule is not None and peak is not None:
            share = schedule_share(schedule, kwargs, at, steps, warmup, peak)
        return None if share is None or peak is None else share * peak

    return {
        "step": step,
        "steps": steps,
        "schedule": schedule,
        "before": finite(newest.get("learning_rate")),
        "after": rate_at(step),  # schedules count steps from zero
        "end": rate_at(max(step, steps - 1)),
    }

"""The figures of events and of the report as scalars with a name."""

from collections.abc import Mapping

from paceline.core import formatting
from paceline.core.event_log import throughput
from paceline.core.events import EvalEvent, StepEvent
from paceline.core.report import ROLLOUT_NUMBERS, Report
from paceline.observe.loggers.base import flat


def step_scalars(step: StepEvent, global_batch_size: float | None) -> dict[str, float]:
    per_second, unit = throughput(step, global_batch_size)
    scalars: dict[str, float | None] = {
        "train/loss": step.get("loss"),
        "train/learning_rate": step.get("learning_rate"),
        "train/grad_norm": step.get("grad_norm"),
        "train/epoch": step.get("epoch"),
        f"train/{unit.replace('/s', '_per_second')}": per_second,
        "train/fill": step.get("fill"),
        "time/step_s": step.get("step_time_s"),
        "time/data_wait_s": step.get("data_wait_s"),
        "time/comm_wait_s": step.get("comm_wait_s"),
    }
    scalars |= {f"train/{name}": value for name, value in (step.get("metrics") or {}).items()}
    for name in ROLLOUT_NUMBERS:
        group = "time" if name.endswith("_s") else "train"
        scalars[f"{group}/{name}"] = step.get(name)  # type: ignore[assignment]
    for name, value in (step.get("rewards") or {}).items():
        scalars[f"train/rewards/{name}"] = value
    experts = step.get("experts")
    if experts is not None:
        scalars["experts/max_over_mean"] = experts["max_over_mean"]
        scalars["experts/aux_loss"] = experts["aux_loss"]
    for source in step.get("sources", []):
        scalars[f"source/{source['name']}/loss"] = source["loss"]
        scalars[f"source/{source['name']}/tokens"] = source["tokens"]
    memory = step.get("memory_bytes")
    if isinstance(memory, list | tuple):
        scalars |= {f"memory/rank_{rank}_bytes": value for rank, value in enumerate(memory)}
    else:
        scalars["memory/bytes"] = memory
    return _numbers(scalars)


def eval_scalars(event: EvalEvent) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in (event.get("metrics") or {}).items()}
    return _numbers({"eval/loss": event.get("loss"), **metrics})


def report_scalars(report: Report) -> dict[str, float]:
    """Return the figures of a report, such as ``report/tokens_per_second``. Texts and lists are
    left out."""
    figures = {
        f"report/{name}": value
        for name, value in flat(report, "/").items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return _numbers(figures)


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    numbers = {name: formatting.number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}

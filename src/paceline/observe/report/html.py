"""``report.html``: one file that opens offline, from a run's report, events and config."""

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline.core import formatting
from paceline.core.event_log import effective_events, effective_steps
from paceline.core.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    NoticeEvent,
    RunStartEvent,
    StepEvent,
)
from paceline.observe.report.certificate import Certificate, certificate_page
from paceline.observe.report.charts import Plot, Point, Series, draw, raw_and_smooth
from paceline.observe.report.tables import communication_rows, memory_table, rank_table

_RANK_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")


def render_report(
    report: dict[str, Any],
    events: list[Event],
    config_yaml: str,
    certificate: Certificate | None = None,
) -> str:
    """The whole page. Every value is escaped: configs and data sets are not trusted.

    Args:
        report: as :func:`paceline.observe.report.write.write_reports` takes it; missing keys show
            as unknown.
        events: all events of the run, of every life.
        config_yaml: the text of ``config.yaml``.
        certificate: of ``paceline verify``, where one was made for this model and task; it becomes
            a section.
    """
    starts = [event for event in events if event["type"] == "run_start"]
    start: RunStartEvent = starts[-1] if starts else {}
    steps = effective_steps(events)
    evals = [event for event in effective_events(events) if event["type"] == "eval"]
    lives = _lives(events, str(report.get("status")))
    page = {
        "name": (
            Path(
                str(
                    start.get("output_dir")
                    or (start.get("config") or {}).get("output_dir")
                    or "run"
                )
            ).name
            or "run"
        ),
        "status": str(report.get("status") or "unknown"),
        "reason": _reason(events, report),
        "subtitle": _subtitle(start),
        "cards": _cards(report, start),
        "plots": _plots(steps, evals, start, lives),
        "data": _data_rows(report.get("data") or start.get("data") or {}),
        "predictions": _predictions(report),
        "communication": communication_rows(report),
        "certificate": certificate and certificate_page(certificate),
        "ranks": rank_table(steps),
        "memory": memory_table(events, start),
        "notices": [
            _notice(event)
            for event in events
            if event["type"] == "notice" or (event["type"] == "checkpoint" and event.get("error"))
        ],
        "lives": lives if len(lives) > 1 else [],
        "config": config_yaml,
        "config_open": config_yaml.count("\n") <= 40,
        "versions": start.get("versions") or {},
    }
    return str(template("report.html.jinja").render(page))


def render_certificate(certificate: Certificate) -> str:
    """Return ``verify.html``: one page that opens offline. Every value is escaped."""
    return str(template("certificate.html.jinja").render(certificate=certificate_page(certificate)))


@cache
def template(name: str, folder: Path = Path(__file__).parent / "templates") -> Any:
    """A template of a folder; all that it is given is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = _script_json
    return environment.get_template(name)


def _script_json(value: Any) -> Any:
    """JSON that cannot end the script element it stands in."""
    from markupsafe import Markup

    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _subtitle(start: RunStartEvent) -> str:
    config, model = start.get("config") or {}, start.get("model") or {}
    begun = formatting.finite(start.get("time"))
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begun)) if begun is not None else None
    return " · ".join(
        str(part)
        for part in (model.get("name"), config.get("task"), start.get("strategy"), when)
        if part
    )


def _reason(events: list[Event], report: dict[str, Any]) -> str:
    ends = [event for event in events if event["type"] == "run_end"]
    is_known = bool(ends) and report.get("status") != "done"
    return str(ends[-1].get("reason") or "") if is_known else ""


def _cards(report: dict[str, Any], start: RunStartEvent) -> list[dict[str, str]]:
    get, model = report.get, start.get("model") or {}
    epochs, resumed, words = (
        formatting.finite(get("epochs")),
        get("resumed_from_step"),
        formatting.short_count,
    )
    metrics = ", ".join(
        f"{name} {formatting.loss(value)}"
        for name, value in (get("final_eval_metrics") or {}).items()
    )
    speed, unit = get("tokens_per_second"), "tokens/s"
    if speed is None and get("samples_per_second") is not None:
        speed, unit = get("samples_per_second"), "samples/s"
    return [
        _card(
            "Training loss",
            formatting.loss(get("final_train_loss")),
            f"from {formatting.loss(get('first_train_loss'))}",
        ),
        _card(
            "Evaluation loss",
            formatting.loss(get("final_eval_loss")),
            metrics or "at the last evaluation",
        ),
        _card("Throughput", formatting.short_count(speed), unit),
        _card(
            "First step",
            formatting.duration(get("time_to_first_step_s")),
            "after the newest start" if get("restarts") else "after the command",
        ),
        _card("Wall time", formatting.duration(get("wall_s"))),
        _card(
            "Peak memory",
            formatting.size(formatting.fullest(get("peak_memory_bytes"))),
            "of the fullest rank",
        ),
        _card(
            "Steps",
            formatting.count(get("steps")),
            f"{epochs:.3g} epochs" if epochs is not None else "",
        ),
        _card("Samples seen", formatting.count(get("samples_seen"))),
        _card(
            "Label tokens", words(get("label_tokens")), f"of {words(get('train_tokens'))} tokens"
        ),
        _card(
            "Strategy",
            _text(get("strategy")),
            f"{formatting.ranks(get('world_size'))} on {_text(get('device'))}",
        ),
        _card("Precision", _text(get("precision"))),
        _card(
            "Parameters",
            words(model.get("parameters")),
            f"{words(model.get('trainable_parameters'))} trained",
        ),
        _card(
            "Resumed at",
            f"step {formatting.count(resumed)}" if resumed is not None else formatting.UNKNOWN,
            f"restarts: {formatting.count(get('restarts'))}",
        ),
    ]


def _text(value: Any) -> str:
    return formatting.UNKNOWN if value is None else str(value)


def _card(label: str, value: str, note: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _data_rows(data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows (what, how many, share of those read)."""
    dropped = data.get("dropped")
    reasons = (
        dropped
        if isinstance(dropped, dict)
        else {"dropped": dropped}
        if dropped is not None
        else {}
    )
    figures = [
        (name, data[name]) for name in ("read", "kept", "truncated") if data.get(name) is not None
    ]
    figures += [(f"dropped: {reason}", many) for reason, many in reasons.items()]
    left_out = data.get("skipped_batches") or {}
    turns = data.get("excluded_turns")
    figures += (
        [("left out: the loss jumped", left_out["samples"])]
        if left_out.get("samples") is not None
        else []
    )
    read = formatting.finite(data.get("read"))
    rows = []
    for name, many in figures:
        figure = formatting.finite(many)
        share = (
            f"{100 * figure / read:.1f} %" if figure is not None and read else formatting.UNKNOWN
        )
        rows.append({"name": name, "count": formatting.count(many), "share": share})
    if turns:  # these are turns, not rows, so they have no share of the rows read
        rows.append(
            {
                "name": "turns without loss",
                "count": formatting.count(turns),
                "share": formatting.UNKNOWN,
            }
        )
    return rows


def _predictions(report: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    figures = {
        "state_memory_bytes": "State memory, fullest rank",
        "traffic_bytes_per_step": "Traffic a step, busiest rank",
    }
    for key, name in figures.items():
        both = report.get(key) or {}
        predicted, measured = (
            formatting.fullest(both.get("predicted")),
            formatting.fullest(both.get("measured")),
        )
        ratio = (
            f"{measured / predicted:.3f}"
            if predicted and measured is not None
            else formatting.UNKNOWN
        )
        if both.get("bound"):
            name += " (the prediction is an upper bound: no id twice in a batch)"
        rows.append(
            {
                "name": name,
                "predicted": formatting.size(predicted),
                "measured": formatting.size(measured),
                "ratio": ratio,
            }
        )
    return rows


def _notice(event: NoticeEvent | CheckpointEvent) -> dict[str, str]:
    if event["type"] == "notice":
        return {
            "level": str(event.get("level") or "info"),
            "text": str(event.get("text", "")),
            "time": _at(event),
        }
    step = formatting.count(event.get("step"))
    return {
        "level": "warning",
        "text": f"{event['type']} at step {step}: {event['error']}",
        "time": _at(event),
    }


def _at(event: Event) -> str:
    seconds = formatting.finite(event.get("time"))
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds is not None else ""


def _lives(events: list[Event], status: str) -> list[dict[str, Any]]:
    """Each time that the run was started: from which step, to which, and how it ended.

    ``status`` is the last one's: the report is written before the log's ``run_end``.
    """
    lives: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "run_start":
            begun = formatting.finite(event.get("time"))
            when = (
                time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun))
                if begun is not None
                else formatting.UNKNOWN
            )
            lives.append(
                {
                    "start": when,
                    "from": event.get("resumed_from_step") or 0,
                    "to": None,
                    "end": None,
                }
            )
        elif event["type"] == "resume" and lives:
            lives[-1]["from"] = event.get("step") or 0
        elif event["type"] == "step" and lives:
            lives[-1]["to"] = event["step"]
        elif event["type"] == "run_end" and lives:
            lives[-1]["end"] = str(event.get("status"))
    for life in lives:
        life["to"] = life["to"] if life["to"] is not None else life["from"]
        life["end"] = life["end"] or (status if life is lives[-1] else "ended without a word")
    return lives


def _plots(
    steps: list[StepEvent],
    evals: list[EvalEvent],
    start: RunStartEvent,
    lives: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    if not steps:
        return []
    batch = (start.get("derived") or {}).get("global_batch_size")
    made = [
        _loss_plot(steps, evals),
        _rate_plot(steps),
        _throughput_plot(steps, batch),
        _time_plot(steps),
        _memory_plot(steps),
        _norm_plot(steps),
    ]
    markers = [
        (life["from"], f"resumed at step {life['from']:,}") for life in lives if life["from"]
    ]
    x_all = [event["step"] for event in (*steps, *evals)]
    x_range = (min(x_all), max(x_all))
    return [draw(plot, x_range, markers) for plot in made if plot.notes or _has_figures(plot)]


def _has_figures(plot: Plot) -> bool:
    return any(y is not None for one in plot.series for _, y in one.points)


def _points(events: Sequence[StepEvent | EvalEvent], key: str, scale: float = 1.0) -> list[Point]:
    return [
        (event["step"], None if (y := formatting.finite(event.get(key))) is None else y / scale)
        for event in events
    ]


def _broken(events: list[StepEvent], key: str, what: str) -> list[str]:
    many = sum(
        1
        for one in events
        if formatting.number(one.get(key)) is not None and formatting.finite(one.get(key)) is None
    )
    return (
        [
            f"{many:,} of {len(events):,} logged steps have a {what} that is not a finite number:"
            " the gaps."
        ]
        if many
        else []
    )


def _loss_plot(steps: list[StepEvent], evals: list[EvalEvent]) -> Plot:
    raw = _points(steps, "loss")
    series = raw_and_smooth("loss", raw, "c1", 10)
    if evals:
        series.append(Series("evaluation", _points(evals, "loss"), "c2", "dots"))
    return Plot("Training loss", "", series, wide=True, notes=_broken(steps, "loss", "loss"))


def _rate_plot(steps: list[StepEvent]) -> Plot:
    return Plot(
        "Learning rate",
        "",
        [Series("learning rate", _points(steps, "learning_rate"), "c3")],
        from_zero=True,
    )


def _norm_plot(steps: list[StepEvent]) -> Plot:
    notes = _broken(steps, "grad_norm", "gradient norm")
    series = raw_and_smooth("gradient norm", _points(steps, "grad_norm"), "c4", 100)
    return Plot("Gradient norm", "", series, from_zero=True, notes=notes)


def _throughput_plot(steps: list[StepEvent], batch: Any) -> Plot:
    found = [formatting.throughput(step, batch) for step in steps]
    unit = found[-1][1]
    points: list[Point] = [
        (step["step"], y if u == unit else None) for step, (y, u) in zip(steps, found, strict=True)
    ]
    return Plot("Throughput", unit, raw_and_smooth("throughput", points, "c5", 100), from_zero=True)


def _memory_plot(steps: list[StepEvent]) -> Plot:
    rows = [(step["step"], _as_list(step.get("memory_bytes"))) for step in steps]
    world = max((len(values) for _, values in rows), default=0)
    top = max(
        (
            figure
            for _, values in rows
            for value in values
            if (figure := formatting.finite(value)) is not None
        ),
        default=0.0,
    )
    scale, unit = next(
        ((s, u) for s, u in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")) if top >= s),
        (1.0, "B"),
    )

    def of(pick: Any) -> list[Point]:
        return [
            (x, None if (y := formatting.finite(pick(values))) is None else y / scale)
            for x, values in rows
        ]

    if world <= len(_RANK_COLOURS):
        series = [
            Series(f"rank {rank}", of(partial(_at_rank, rank)), _RANK_COLOURS[rank])
            for rank in range(world)
        ]
        return Plot("Memory of each rank", unit, series, from_zero=True)
    series = [
        Series("fullest rank", of(formatting.fullest)),
        Series("emptiest rank", of(_emptiest), "c2"),
    ]
    return Plot(f"Memory, {world} ranks", unit, series, from_zero=True)


def _at_rank(rank: int, values: list[Any]) -> Any:
    return values[rank] if rank < len(values) else None


def _emptiest(values: list[Any]) -> float | None:
    return min(
        (figure for value in values if (figure := formatting.finite(value)) is not None),
        default=None,
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _time_plot(steps: list[StepEvent]) -> Plot:
    """Where a step's time goes. What is not measured stays in the first layer, which is named after
    it."""
    total = [formatting.finite(step.get("step_time_s")) for step in steps]
    top = max((seconds for seconds in total if seconds is not None), default=0.0)
    scale, unit = (1.0, "s") if top >= 1 else (1e-3, "ms")
    waits = [(key, name, colour) for key, name, colour in
             (("data_wait_s", "data wait", "c2"), ("comm_wait_s", "communication wait", "c4"))
             if any(formatting.finite(step.get(key)) is not None for step in steps)]  # fmt: skip
    rest: list[Point] = []
    layers: dict[str, list[Point]] = {key: [] for key, *_ in waits}
    for step, seconds in zip(steps, total, strict=True):
        spent = {key: formatting.finite(step.get(key)) or 0.0 for key in layers}
        rest.append(
            (
                step["step"],
                None if seconds is None else max(0.0, seconds - sum(spent.values())) / scale,
            )
        )
        for key, value in spent.items():
            layers[key].append((step["step"], None if seconds is None else value / scale))
    alone = (
        len({rank for step in steps for rank in range(len(_as_list(step.get("memory_bytes"))))})
        == 1
    )
    rest_name = "compute"
    if "data_wait_s" not in layers:
        rest_name += " and data wait"
    if "comm_wait_s" not in layers and not alone:
        rest_name += " and communication"
    stack = [Series(rest_name, rest, "c1", "area")]
    stack += [Series(text, layers[key], colour, "area") for key, text, colour in waits]
    return Plot("Time of a step", unit, stack, from_zero=True)

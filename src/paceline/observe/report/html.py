"""A run's result: ``report.json`` for programs, ``report.html`` for people, which opens offline."""

import json
import math
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline.core import formatting
from paceline.core.event_log import effective_events, effective_steps, read_events
from paceline.core.events import (
    CheckpointEvent,
    DataFigures,
    Event,
    NoticeEvent,
    RunStartEvent,
)
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.run_dir import RunDir
from paceline.observe.report.certificate import Certificate, certificate_page
from paceline.observe.report.charts import draw_plots
from paceline.observe.report.record import Report, SkippedBatches, check_report
from paceline.observe.report.tables import communication_rows, memory_table, rank_table


def render_report(
    report: Report,
    events: list[Event],
    config_yaml: str,
    certificate: Certificate | None = None,
) -> str:
    """The whole page. Every value is escaped: configs and data sets are not trusted.

    Args:
        report: as :func:`write_reports` takes it; missing keys show
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
    data = report.get("data") or {}
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
        "plots": draw_plots(
            steps, evals, start, [life.first_step for life in lives if life.first_step]
        ),
        "data": _data_rows(data or start.get("data") or {}, data.get("skipped_batches")),
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


def _reason(events: list[Event], report: Report) -> str:
    ends = [event for event in events if event["type"] == "run_end"]
    is_known = bool(ends) and report.get("status") != "done"
    return str(ends[-1].get("reason") or "") if is_known else ""


def _cards(report: Report, start: RunStartEvent) -> list[dict[str, str]]:
    get, model = report.get, start.get("model") or {}
    epochs, resumed, words = (
        formatting.finite(get("epochs")),
        get("resumed_from_step"),
        formatting.short_count,
    )
    figures = report.get("final_eval_metrics") or {}
    metrics = ", ".join(f"{name} {formatting.loss(value)}" for name, value in figures.items())
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


def _data_rows(data: DataFigures, skipped: SkippedBatches | None) -> list[dict[str, str]]:
    """Rows (what, how many, share of those read)."""
    dropped = data.get("dropped") or {}
    if not isinstance(dropped, dict):  # of a report without reasons
        dropped = {"dropped": dropped}
    turns = data.get("excluded_turns")
    counts = [(name, data.get(name)) for name in ("read", "kept", "truncated")]
    counts += [(f"dropped: {reason}", num_rows) for reason, num_rows in dropped.items()]
    counts.append(("left out: the loss jumped", skipped["samples"] if skipped else None))
    read = formatting.finite(data.get("read"))
    rows = []
    for name, num_rows in counts:
        if num_rows is None:
            continue
        number = formatting.finite(num_rows)
        share = (
            f"{100 * number / read:.1f} %" if number is not None and read else formatting.UNKNOWN
        )
        rows.append({"name": name, "count": formatting.count(num_rows), "share": share})
    if turns:  # these are turns, not rows, so they have no share of the rows read
        rows.append(
            {
                "name": "turns without loss",
                "count": formatting.count(turns),
                "share": formatting.UNKNOWN,
            }
        )
    return rows


def _predictions(report: Report) -> list[dict[str, str]]:
    rows = []
    memory, traffic = report.get("state_memory_bytes"), report.get("traffic_bytes_per_step")
    traffic_name = "Traffic a step, busiest rank"
    if traffic and traffic.get("bound"):
        traffic_name += " (the prediction is an upper bound: no id twice in a batch)"
    for name, pair in (("State memory, fullest rank", memory), (traffic_name, traffic)):
        predicted = formatting.fullest(pair and pair["predicted"])
        measured = formatting.fullest(pair and pair["measured"])
        ratio = (
            f"{measured / predicted:.3f}"
            if predicted and measured is not None
            else formatting.UNKNOWN
        )
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


@dataclass
class _Life:
    """One start of the run."""

    start: str
    first_step: int
    last_step: int | None = None
    end: str = ""


def _lives(events: list[Event], status: str) -> list[_Life]:
    """Each time that the run was started: from which step, to which, and how it ended.

    ``status`` is the last one's: the report is written before the log's ``run_end``.
    """
    lives: list[_Life] = []
    for event in events:
        if event["type"] == "run_start":
            begun = formatting.finite(event.get("time"))
            when = (
                time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun))
                if begun is not None
                else formatting.UNKNOWN
            )
            lives.append(_Life(when, event.get("resumed_from_step") or 0))
        elif event["type"] == "resume" and lives:
            lives[-1].first_step = event.get("step") or 0
        elif event["type"] == "step" and lives:
            lives[-1].last_step = event["step"]
        elif event["type"] == "run_end" and lives:
            lives[-1].end = str(event.get("status"))
    for life in lives:
        life.last_step = life.first_step if life.last_step is None else life.last_step
        life.end = life.end or (status if life is lives[-1] else "ended without a report")
    return lives


def write_reports(run_dir: RunDir, report: Report) -> None:
    """Write ``report.json`` and, from it and the run's events and config, ``report.html``; each
    whole or not at all.

    NaN and the infinities, which JSON has not, become the strings "nan", "inf", "-inf".

    Raises:
        KeyError: a key of :class:`Report` is missing, or one is not known.
        OSError: a file cannot be written.
    """
    check_report(report)
    write_json_atomic(run_dir.report, _for_json(report))
    config_yaml = (
        run_dir.config.read_text(encoding="utf-8", errors="replace")
        if run_dir.config.is_file()
        else ""
    )
    events = read_events(run_dir.events)
    write_atomic(
        run_dir.report_html,
        render_report(report, events, config_yaml, _certificate(run_dir, events)),
    )


def _certificate(run_dir: RunDir, events: list[Event]) -> Certificate | None:
    """That of ``paceline verify --output RUN``, where it is of the run's model and task."""
    configs = [event["config"] for event in events if event["type"] == "run_start"]
    config = configs[-1] if configs else {}
    try:
        certificate: Certificate = json.loads((run_dir.root / "verify.json").read_text())
        same = (certificate["model"], certificate["task"]) == (
            config.get("model"),
            config.get("task"),
        )
        return certificate if same and certificate_page(certificate) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # none there, or not one of ours


def _for_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    return [_for_json(item) for item in value] if isinstance(value, list | tuple) else value

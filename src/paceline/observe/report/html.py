"""Write the result of a run: ``report.json``, and ``report.html``, which can be opened offline."""

import json
import math
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core import formatting
from paceline.core.event_log import (
    CommandTimes,
    command_times,
    effective_events,
    effective_steps,
    read_events,
)
from paceline.core.events import CheckpointEvent, Event, NoticeEvent, ProfileEvent, RunStartEvent
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.report import DataFigures, Report, SkippedBatches, check_report
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.messages.event_text import event_text
from paceline.messages.pages import PageText, add_languages
from paceline.observe.report.certificate import Certificate, certificate_page
from paceline.observe.report.charts import draw_plots
from paceline.observe.report.tables import (
    communication_rows,
    expert_table,
    memory_table,
    rank_table,
    source_table,
)


def render_report(
    report: Report,
    events: list[Event],
    config_yaml: str,
    certificate: Certificate | None = None,
) -> str:
    """Return ``report.html``. All values are escaped, because configs and datasets are not trusted.

    Args:
        report: the report as for :func:`write_reports`. Missing keys are shown as unknown.
        events: the events of all attempts of the run.
        config_yaml: the text of ``config.yaml``.
        certificate: the certificate of ``paceline verify`` for this model and task, if there is
            one.
    """
    starts = [event for event in events if event["type"] == "run_start"]
    start: RunStartEvent = starts[-1] if starts else {}
    config = start.get("config") or {}
    steps = effective_steps(events)
    evals = [event for event in effective_events(events) if event["type"] == "eval"]
    attempts = _attempts(events, str(report.get("status")))
    resumed_from = [attempt.first_step for attempt in attempts if attempt.first_step]
    data, peak = report.get("data") or {}, report.get("peak")
    packing = report.get("packing")
    output_dir = start.get("output_dir") or config.get("output_dir") or "run"
    page = {
        "name": Path(str(output_dir)).name or "run",
        "status": str(report.get("status") or "unknown"),
        "reason": _reason(events, report),
        "subtitle": " · ".join(
            str(part)
            for part in (
                (start.get("model") or {}).get("name"),
                config.get("task"),
                start.get("strategy"),
                _utc("%Y-%m-%d %H:%M UTC", start),
            )
            if part
        ),
        "cards": _cards(report, start, command_times(events)),
        "peak": peak and formatting.peak_line(peak),
        "plots": draw_plots(steps, evals, start, resumed_from),
        "data": _data_rows(data or start.get("data") or {}, data.get("skipped_batches")),
        "packing": packing and formatting.packing_line(packing),
        "sources": source_table(report),
        "experts": expert_table(report),
        "predictions": _predictions(report),
        "communication": communication_rows(report),
        "certificate": certificate and certificate_page(certificate),
        "ranks": rank_table(steps),
        "memory": memory_table(events, start),
        "profiles": [_profile(event) for event in events if event["type"] == "profile"],
        "notices": [
            _notice(event)
            for event in events
            if event["type"] == "notice" or (event["type"] == "checkpoint" and event.get("error"))
        ],
        "attempts": attempts if len(attempts) > 1 else [],
        "config": config_yaml,
        "config_open": config_yaml.count("\n") <= 40,
        "versions": start.get("versions") or {},
    }
    return str(template("report.html.jinja").render(page))


def render_certificate(certificate: Certificate) -> str:
    """Return ``verify.html``, a page that can be opened offline. All values are escaped."""
    return str(template("certificate.html.jinja").render(certificate=certificate_page(certificate)))


@cache
def template(name: str, folder: Path = Path(__file__).parent / "templates") -> Any:
    """Load a Jinja template that escapes all values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = _script_json
    environment.filters["by_step"] = lambda title: PageText("{title} by step", title=title)
    add_languages(environment)
    return environment.get_template(name)


def _script_json(value: Any) -> Any:
    """Return JSON without characters that could end the script element that contains it."""
    from markupsafe import Markup

    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _utc(pattern: str, event: Event) -> str | None:
    """Return the time of an event, or None if it has no time."""
    seconds = formatting.finite(event.get("time"))
    return None if seconds is None else time.strftime(pattern, time.gmtime(seconds))


def _reason(events: list[Event], report: Report) -> str:
    ends = [event for event in events if event["type"] == "run_end"]
    if report.get("stop_reason"):
        return str(report["stop_reason"])
    return str(ends[-1].get("reason") or "") if ends and report.get("status") != "done" else ""


def _cards(report: Report, start: RunStartEvent, commands: CommandTimes) -> list[dict[str, str]]:
    """Return the label, the value and the note of each card."""
    get, model, fmt = report.get, start.get("model") or {}, formatting
    eval_metrics = report.get("final_eval_metrics") or {}
    metrics = ", ".join(f"{name} {fmt.loss(value)}" for name, value in eval_metrics.items())
    epochs, resumed = fmt.finite(get("epochs")), get("resumed_from_step")
    epochs_text = "" if epochs is None else PageText("{epochs:epoch}", epochs=epochs)
    rate, unit = get("tokens_per_second"), "tokens/s"
    if rate is None and get("samples_per_second") is not None:
        rate, unit = get("samples_per_second"), "samples/s"
    peak = fmt.max_over_ranks(get("peak_memory_bytes"))
    cards = [
        ("Training loss", fmt.loss(get("final_train_loss")),
         PageText("from {loss}", loss=fmt.loss(get("first_train_loss")))),
        ("Evaluation loss", fmt.loss(get("final_eval_loss")), metrics or "at the last evaluation"),
        ("Best evaluation", *_best(report)),
        ("Throughput", fmt.short_count(rate), unit),
        ("Compute rate", fmt.flops(get("flops_per_device_s"), get("mfu")) or fmt.UNKNOWN,
         "per device, without recomputation"),
        ("First step", fmt.duration(get("time_to_first_step_s")),
         "after the last restart" if get("restarts") else "after the command"),
        ("Wall time", *_wall_time(report, commands)),
        ("Peak memory", fmt.size(peak), "maximum over the ranks"),
        ("Steps", fmt.count(get("steps")), epochs_text),
        ("Samples seen", fmt.count(get("samples_seen")), ""),
        ("Label tokens", fmt.short_count(get("label_tokens")),
         PageText("of {tokens} tokens", tokens=fmt.short_count(get("train_tokens")))),
        ("Strategy", _text(get("strategy")),
         PageText("{ranks} on {device}", ranks=fmt.ranks(get("world_size")),
                  number=fmt.count(get("world_size")), device=_text(get("device")))),
        ("Precision", _text(get("precision")), _number_formats(report)),
        ("Parameters", fmt.short_count(model.get("parameters")),
         PageText("{count} trained",
                  count=fmt.short_count(model.get("trainable_parameters")))),
        ("Resumed at",
         fmt.UNKNOWN if resumed is None else PageText("step {step}", step=fmt.count(resumed)),
         PageText("restarts: {count}", count=fmt.count(get("restarts")))),
        *_benchmark_cards(report),
    ]  # fmt: skip
    if "hub" in report:
        hub = report["hub"]
        cards.append(("Uploaded to", _text(hub.get("repository")), hub.get("error") or ""))
    shown = [card for card in cards if card[0] != "Best evaluation" or report.get("best")]
    return [{"label": label, "value": value, "note": note} for label, value, note in shown]


def _wall_time(report: Report, commands: CommandTimes) -> tuple[str, str]:
    """Return the value and the note of the card of the wall time. In the report, it is the time of
    the latest command only."""
    wall_s = formatting.finite(report.get("wall_s"))
    if wall_s is None or commands.count < 2:
        return formatting.duration(wall_s), ""
    return formatting.duration(commands.earlier_s + wall_s), f"of all {commands.count} commands"


def _best(report: Report) -> tuple[str, str]:
    """Return the value and the note of the card of the best evaluation."""
    best = report.get("best")
    if not best:
        return "", ""
    in_model = "its weights are in model/" if best["is_final"] else "model/ has later weights"
    return formatting.loss(best["value"]), PageText(
        "{metric} at step {step}; {in_model}",
        metric=best["metric"],
        step=formatting.count(best["step"]),
        in_model=in_model,
    )


def _benchmark_cards(report: Report) -> list[tuple[str, str, str]]:
    """Return a card for each task of lm-evaluation-harness, with its metrics but not their standard
    errors."""
    results: Any = (report.get("lm_eval") or {}).get("results") or {}
    cards = []
    for task, metrics in results.items():
        (first, value), *others = [
            (name, number) for name, number in metrics.items() if "_stderr" not in name
        ] or [("", None)]
        note = ", ".join([first, *(f"{name} {formatting.loss(number)}" for name, number in others)])
        cards.append((task, formatting.loss(value), note))
    return cards


def _text(value: Any) -> str:
    return formatting.UNKNOWN if value is None else str(value)


def _number_formats(report: Report) -> str:
    """Return the formats of matrix products besides the formats of the precision."""
    fp8 = report.get("fp8", "none")
    formats = ["TF32"] * bool(report.get("tf32")) + [f"float8 ({fp8})"] * (fp8 != "none")
    return PageText("with {formats}", formats=", ".join(formats)) if formats else ""


def _data_rows(data: DataFigures, skipped: SkippedBatches | None) -> list[dict[str, str]]:
    """Return the name, the count and the share of all rows read for each line of the data table."""
    dropped = data.get("dropped") or {}
    if not isinstance(dropped, dict):  # a report without reasons
        dropped = {"dropped": dropped}
    counts = [(name, data.get(name)) for name in ("read", "kept", "truncated")]
    counts += [
        (PageText("dropped: {reason}", reason=reason), num_rows)
        for reason, num_rows in dropped.items()
    ]
    counts.append(("skipped after a loss spike", skipped["samples"] if skipped else None))
    # Turns are not rows, so they are not a share of the rows read.
    counts.append(("turns without loss", data.get("excluded_turns") or None))
    read = formatting.finite(data.get("read"))
    rows = []
    for name, count in counts:
        if count is None:
            continue
        number = formatting.finite(count)
        share = formatting.UNKNOWN
        if number is not None and read and name != "turns without loss":
            share = f"{100 * number / read:.1f} %"
        rows.append({"name": name, "count": formatting.count(count), "share": share})
    return rows


_BOUND = (
    "Traffic per step, busiest rank (predicted: an upper bound, for a batch without repeated ids)"
)


def _predictions(report: Report) -> list[dict[str, str]]:
    memory, traffic = report.get("state_memory_bytes"), report.get("traffic_bytes_per_step")
    times = report.get("step_time_s")
    traffic_name = "Traffic per step, busiest rank"
    if traffic and traffic.get("bound"):
        traffic_name = _BOUND
    rows = []
    for name, pair, as_text in (
        ("State memory, maximum over the ranks", memory, formatting.size),
        (traffic_name, traffic, formatting.size),
        ("Time per step, mean without the first", times, formatting.duration),
    ):
        predicted = formatting.max_over_ranks(pair and pair["predicted"])
        measured = formatting.max_over_ranks(pair and pair["measured"])
        ratio = formatting.UNKNOWN
        if predicted and measured is not None:
            ratio = f"{measured / predicted:.3f}"
        rows.append(
            {
                "name": name,
                "predicted": as_text(predicted),
                "measured": as_text(measured),
                "ratio": ratio,
            }
        )
    return rows


def _notice(event: NoticeEvent | CheckpointEvent) -> dict[str, str]:
    level, text = event_text(event)
    if not isinstance(text, UserText):  # of an older version
        text = UserText.of(text, "", {})
    return {"level": level, "text": text, "time": _utc("%H:%M:%S", event) or ""}


class _ProfileFiles(NamedTuple):
    """The links of a profile: (name, path relative to the folder of the run)."""

    steps: str
    files: list[tuple[str, str]]


def _profile(event: ProfileEvent) -> _ProfileFiles:
    first, last = event.get("first_step"), event.get("step")
    files: list[tuple[str, str]] = []
    for label, paths in (
        ("rank {rank}", event.get("traces", [])),
        ("memory of rank {rank}", event.get("memory_snapshots", [])),
    ):
        # only the name, because the log may come from somebody else
        files += [
            (PageText(label, rank=rank), f"profile/{Path(path).name}")
            for rank, path in enumerate(paths)
        ]
    steps = PageText(
        "Profile of steps {first} to {last}",
        first=formatting.count(first),
        last=formatting.count(last),
    )
    return _ProfileFiles(steps, files)


@dataclass
class _Attempt:
    """One start of the run."""

    start: str
    first_step: int
    last_step: int | None = None
    end: str = ""


def _attempts(events: list[Event], status: str) -> list[_Attempt]:
    """Return each start of the run, with its steps and its end.

    ``status`` is the outcome of the last one, because the report is written before ``run_end``.
    """
    attempts: list[_Attempt] = []
    for event in events:
        if event["type"] == "run_start":
            started = _utc("%Y-%m-%d %H:%M:%S UTC", event) or formatting.UNKNOWN
            attempts.append(_Attempt(started, event.get("resumed_from_step") or 0))
        elif not attempts:
            continue
        elif event["type"] == "resume":
            attempts[-1].first_step = event.get("step") or 0
        elif event["type"] == "step":
            attempts[-1].last_step = event["step"]
        elif event["type"] == "run_end":
            attempts[-1].end = str(event.get("status"))
    for attempt in attempts:
        if attempt.last_step is None:
            attempt.last_step = attempt.first_step
        attempt.end = attempt.end or (status if attempt is attempts[-1] else "no report")
    return attempts


def write_reports(run_dir: RunDir, report: Report) -> None:
    """Write ``report.json`` and ``report.html``, each atomically.

    NaN and infinities, which JSON cannot represent, become the strings "nan", "inf" and "-inf".

    Raises:
        KeyError: a key of :class:`Report` is missing or unknown.
        OSError: a file cannot be written.
    """
    check_report(report)
    write_json_atomic(run_dir.report, _for_json(report))
    config_yaml = ""
    if run_dir.config.is_file():
        config_yaml = run_dir.config.read_text(encoding="utf-8", errors="replace")
    events = read_events(run_dir.events)
    page = render_report(report, events, config_yaml, _certificate(run_dir, events))
    write_atomic(run_dir.report_html, page)


def _certificate(run_dir: RunDir, events: list[Event]) -> Certificate | None:
    """Return the certificate of ``paceline verify --output RUN`` if it belongs to the model and the
    task of the run."""
    configs = [event["config"] for event in events if event["type"] == "run_start"]
    config = configs[-1] if configs else {}
    try:
        certificate: Certificate = json.loads((run_dir.root / "verify.json").read_text())
        is_same = all(certificate[key] == config.get(key) for key in ("model", "task"))
        return certificate if is_same and certificate_page(certificate) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the file does not exist, or Paceline has not written it


def _for_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    return [_for_json(item) for item in value] if isinstance(value, list | tuple) else value

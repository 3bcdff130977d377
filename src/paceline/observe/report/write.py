"""A run's result: ``report.json`` for programs, ``report.html`` for people."""

import json
import math
from typing import Any

from paceline.core.event_log import read_events
from paceline.core.events import Event
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.run_dir import RunDir
from paceline.observe.report.certificate import Certificate, certificate_page

REPORT_KEYS = (
    "status", "strategy", "world_size", "device", "steps", "epochs", "samples_seen", "train_tokens",
    "label_tokens", "tokens_per_second", "time_to_first_step_s", "wall_s", "first_train_loss",
    "final_train_loss", "final_eval_loss", "peak_memory_bytes", "state_memory_bytes",
    "traffic_bytes_per_step", "restarts", "resumed_from_step", "data",
)  # fmt: skip
#: may stand beside them
MORE_KEYS = (
    "samples_per_second", "final_eval_metrics", "communication", "link", "staleness",
    "workers_lost", "skipped_steps", "precision", "balance",
)  # fmt: skip
_PREDICTED = ("predicted", "measured")
_INNER_KEYS = {
    "state_memory_bytes": _PREDICTED,
    "traffic_bytes_per_step": _PREDICTED,
    "data": ("read", "kept", "dropped"),
}
_INNER_OPTIONAL = {
    "data": ("truncated", "excluded_turns", "skipped_batches"),
    "traffic_bytes_per_step": ("bound",),
}


def check_report(report: dict[str, Any]) -> None:
    """Raise KeyError, naming every missing and every unknown key, where ``report`` is not of the
    fixed shape."""
    wrong = _differences(report, REPORT_KEYS, MORE_KEYS, "")
    for key, inner in _INNER_KEYS.items():
        if isinstance(report.get(key), dict):
            wrong += _differences(report[key], inner, _INNER_OPTIONAL.get(key, ()), f"{key}.")
    if wrong:
        raise KeyError("; ".join(wrong))


def _differences(
    found: dict[str, Any], keys: tuple[str, ...], optional: tuple[str, ...], prefix: str
) -> list[str]:
    missing = [f"missing {prefix}{key}" for key in keys if key not in found]
    return missing + [
        f"unknown {prefix}{key}" for key in found if key not in keys and key not in optional
    ]


def write_reports(run_dir: RunDir, report: dict[str, Any]) -> None:
    """Write ``report.json`` and, from it and the run's events and config, ``report.html``; each
    whole or not at all.

    NaN and the infinities, which JSON has not, become the strings "nan", "inf", "-inf".

    Raises:
        KeyError: a key of :data:`REPORT_KEYS` is missing, or one is not known.
        OSError: a file cannot be written.
    """
    from paceline.observe.report.html import render_report

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
    config: dict[str, Any] = next(
        (event["config"] for event in reversed(events) if event["type"] == "run_start"), {}
    )
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

"""The tables of the report: time and memory by rank, and communication."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import JsonValue

from paceline.core import formatting
from paceline.core.event_log import effective_events
from paceline.core.events import Event, RunStartEvent, StepEvent
from paceline.core.report import Report
from paceline.messages.pages import PageText

#: Keys of a step's ``ranks`` that are redundant if the parts of the step are known; and labels.
_OLDER = ("data_wait_s", "comm_wait_s")
_NAMES = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "communication_s": "communication, not hidden",
    "optimizer_s": "optimizer",
    "other_s": "rest",
    "memory_bytes": "memory",
}
_KINDS = ("parameters", "gradients", "optimizer", "activations", "total")


class FigureTable(NamedTuple):
    """A table of figures that were measured at ``step``."""

    columns: list[str]
    rows: list[list[str]]
    step: int | None = None


class TableRow(NamedTuple):
    """A row of the communication table. ``is_text`` tells whether the value is a sentence instead
    of a figure."""

    name: str
    value: str
    is_text: bool = False


def rank_table(steps: Sequence[StepEvent]) -> FigureTable:
    """Return the figures of each rank in the last step that has them."""
    last = next((step for step in reversed(steps) if step.get("ranks")), StepEvent())
    rows = last.get("ranks") or []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if "forward_s" in keys:
        keys = [key for key in keys if key not in _OLDER]
    cells = [[_cell(key, row.get(key)) for key in keys] for row in rows]
    return FigureTable([_NAMES.get(key, key) for key in keys], cells, last.get("step"))


def source_table(report: Report) -> FigureTable:
    """Return the figures of each source; empty if there is only one."""
    rows = [
        [
            source["name"],
            formatting.count(source["samples"]),
            formatting.count(source["tokens"]),
            "–" if source["epochs"] is None else formatting.significant(source["epochs"]),
            formatting.loss(source["first_loss"]),
            formatting.loss(source["final_loss"]),
        ]
        for source in report.get("sources", [])
    ]
    return FigureTable(["samples", "tokens", "epochs", "first loss", "final loss"], rows)


def expert_table(report: Report) -> FigureTable:
    """Return the tokens of the experts of each layer; empty for a model without experts."""
    rows = []
    for layer in (report.get("experts") or {}).get("layers", []):
        tokens = layer["tokens"]
        mean = sum(tokens) / max(1, len(tokens))
        rows.append(
            [
                layer["name"],
                formatting.count(len(tokens)),
                formatting.count(min(tokens, default=None)),
                formatting.count(round(mean)),
                formatting.count(max(tokens, default=None)),
                f"{max(tokens) / mean:.3f}" if mean else formatting.UNKNOWN,
            ]
        )
    columns = ["experts", "fewest tokens", "mean tokens", "most tokens", "maximum over mean"]
    return FigureTable(columns, rows, (report.get("experts") or {}).get("from_step"))


def memory_table(events: Sequence[Event], start: RunStartEvent) -> FigureTable:
    """Return the predicted maximum memory and the measured memory of each rank. Empty if memory was
    not measured.

    Args:
        events: the events of the run.
        start: the last ``run_start``.
    """
    measured = [event for event in effective_events(events) if event["type"] == "memory"]
    ranks = measured[-1].get("ranks") or [] if measured else []
    predicted = (start.get("predicted") or {}).get("memory_bytes")
    rows = [("predicted maximum", predicted)] if ranks and isinstance(predicted, dict) else []
    rows += [(PageText("rank {rank}", rank=rank), row) for rank, row in enumerate(ranks)]
    cells = [
        [name, *(formatting.size(formatting.finite(row.get(kind))) for kind in _KINDS)]
        for name, row in rows
    ]
    return FigureTable(list(_KINDS), cells)


def _cell(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return formatting.size(formatting.max_over_ranks(value))
    seconds = formatting.finite(value)
    if key.endswith("_s") and seconds is not None and abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    if key.endswith("_s"):
        return formatting.duration(value)
    figure = formatting.number(value)
    if figure is not None:
        return f"{figure:,.6g}"
    return formatting.UNKNOWN if value is None else str(value)


def communication_rows(report: Report) -> list[TableRow]:
    """Return the rows of the communication table; empty if the report has no ``communication``."""
    figures, link = report.get("communication") or {}, report.get("link") or {}
    if not figures:
        return []
    method = str(figures.get("method"))
    rows = [TableRow("Method", "plain ddp" if method == "none" else method)]
    if "ratio_sent" in figures:
        ratio = formatting.finite(figures["ratio_sent"])
        text = f"1/{ratio:.4g}" if ratio else formatting.UNKNOWN
        rows.append(TableRow("Sent, relative to plain ddp", text))
    if "residual_norm" in figures:
        norm = formatting.finite(figures["residual_norm"])
        text = "none" if norm is None else f"{norm:.4g}"
        rows.append(TableRow("Norm of what is still to be sent", text))
    if "synchronisations" in figures:
        each = formatting.size(figures.get("bytes_per_synchronisation"))
        number = formatting.count(figures["synchronisations"])
        text = PageText("{count}, {size} each", count=number, size=each)
        rows.append(TableRow("Synchronizations", text))
    if link:
        latency = formatting.short_duration(link.get("latency_s"))
        bandwidth = formatting.bit_rate(link.get("bandwidth_bytes_s"))
        text = PageText("{rate}, {latency} per message", rate=bandwidth, latency=latency)
        rows.append(TableRow("Link, measured", text))
    rows += _times(figures)
    if method != "none" and "pays" in figures:
        pays = figures["pays"]
        verdict = "unknown" if pays is None else "yes" if pays else "no"
        rows.append(TableRow("Pays on this link", verdict, is_text=True))
    if figures.get("why"):
        rows.append(TableRow("Why", str(figures["why"]), is_text=True))
    return rows


def _times(figures: dict[str, JsonValue]) -> list[TableRow]:
    short, ddp = formatting.short_duration, figures.get("ddp")
    share = formatting.finite(figures.get("wait_share"))
    rows = []
    if figures.get("step_s") is not None:
        rows.append(TableRow("Time per step", short(figures["step_s"])))
    if share is not None:
        text = f"{short(figures.get('wait_s'))} ({100 * share:.0f} %)"
        rows.append(TableRow("of which waiting for communication", text))
    if figures.get("method_s") is not None:
        rows.append(TableRow("Computation of the method, per step", short(figures["method_s"])))
    if isinstance(ddp, dict):
        rows += [
            TableRow("All-reduce of plain ddp, predicted", short(ddp.get("all_reduce_s"))),
            TableRow("Waiting time of plain ddp, predicted", short(ddp.get("wait_s"))),
            TableRow("Time per step of plain ddp, predicted", short(ddp.get("step_s"))),
        ]
    return rows

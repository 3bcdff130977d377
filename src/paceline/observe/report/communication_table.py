"""The report's table of what was sent between the replicas, what it took, and whether that pays."""

from typing import Any

from paceline.core import formatting


def communication_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows {name, value, text}; ``text``: a sentence, no figure. Empty where the report says
    nothing of it."""
    figures, link = report.get("communication") or {}, report.get("link") or {}
    if not figures:
        return []
    method = str(figures.get("method"))
    rows = [("Method", "plain ddp" if method == "none" else method)]
    if "ratio_sent" in figures:
        ratio = formatting.finite(figures["ratio_sent"])
        rows.append(
            ("Sent, of what plain ddp sends", f"1/{ratio:.4g}" if ratio else formatting.UNKNOWN)
        )
    if "residual_norm" in figures:
        norm = formatting.finite(figures["residual_norm"])
        rows.append(
            ("Norm of what waits to be sent", "nothing waits" if norm is None else f"{norm:.4g}")
        )
    if "synchronisations" in figures:
        each = formatting.size(figures.get("bytes_per_synchronisation"))
        rows.append(
            ("Synchronisations", f"{formatting.count(figures['synchronisations'])}, {each} each")
        )
    if link:
        rows.append(("Link, measured", f"{formatting.bit_rate(link.get('bandwidth_bytes_s'))}, "
                     f"{formatting.short_duration(link.get('latency_s'))} a message"))  # fmt: skip
    rows += _times(figures)
    sentences = []
    if method != "none" and "pays" in figures:
        sentences.append(
            ("Pays on this link", {True: "yes", False: "no"}.get(figures["pays"], "not known"))
        )
    if figures.get("why"):
        sentences.append(("Why", str(figures["why"])))
    return [{"name": name, "value": value, "text": False} for name, value in rows] + [
        {"name": name, "value": value, "text": True} for name, value in sentences
    ]


def _times(figures: dict[str, Any]) -> list[tuple[str, str]]:
    short, ddp = formatting.short_duration, figures.get("ddp") or {}
    share = formatting.finite(figures.get("wait_share"))
    rows = []
    if figures.get("step_s") is not None:
        rows.append(("A step", short(figures["step_s"])))
    if share is not None:
        rows.append(
            (
                "Of it waiting for communication",
                f"{short(figures.get('wait_s'))} ({100 * share:.0f} %)",
            )
        )
    if figures.get("method_s") is not None:
        rows.append(("The method's own computing, a step", short(figures["method_s"])))
    if ddp:
        rows.append(("All-reduce of plain ddp, predicted", short(ddp.get("all_reduce_s"))))
        rows.append(("Waiting of plain ddp for it, predicted", short(ddp.get("wait_s"))))
        rows.append(("A step of plain ddp, predicted", short(ddp.get("step_s"))))
    return rows

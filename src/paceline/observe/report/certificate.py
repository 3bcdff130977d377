"""What a certificate of ``paceline verify`` shows: its table, its summary and its page."""

import time
from typing import Any

from paceline.core.files import human_bytes


def rows(certificate: dict[str, Any]) -> list[dict[str, str]]:
    """The modes as text, for a table. ``verdict``: ok, not ok, or refused."""
    return [
        {
            "mode": str(mode["mode"]),
            "layout": str(mode["layout"]),
            "loss": _difference(mode["loss_rel_diff"]),
            "weights": _difference(mode["weight_rel_diff"]),
            "state": _both(mode["state_bytes"]),
            "traffic": _both(mode["traffic_bytes"]),
            "time": (
                "–" if mode["relative_step_time"] is None else f"{mode['relative_step_time']:.2f}×"
            ),
            "verdict": "refused" if mode["ok"] is None else "ok" if mode["ok"] else "not ok",
            "reason": str(mode["reason"] or ""),
        }
        for mode in certificate["modes"]
    ]


def _difference(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else _power(value)


def _power(value: float) -> str:
    """``1e-5``, not ``1e-05``."""
    return f"{value:.0e}".replace("e-0", "e-")


def _both(value: dict[str, Any]) -> str:
    if value["measured"] is None or value["predicted"] is None:
        return "–"
    predicted, measured = human_bytes(value["predicted"]), human_bytes(value["measured"])
    unit = predicted.rpartition(" ")[2]
    return (
        f"{predicted.removesuffix(' ' + unit) if measured.endswith(unit) else predicted} →"
        f" {measured}"
    )


def summary(certificate: dict[str, Any]) -> str:
    """What was done and by what it was judged, in two sentences."""
    bounds, modes = certificate["bounds"], certificate["modes"]
    passed = sum(1 for mode in modes if mode["ok"])
    tried = sum(1 for mode in modes if mode["ok"] is not None)
    family = (
        f" (ddp and zero1, 2, 3 among each other: {_power(bounds['family'])})"
        if bounds["family"] is not None
        else ""
    )
    get = certificate.__getitem__
    return (
        f"{passed} of {tried} modes agree with {get('reference')}: {get('steps')} steps of"
        f" {get('optim')} in precision {get('precision')} on {get('world_size')} × {get('device')},"
        f" global batch {get('global_batch_size')}, dropout off. Relative bounds: losses"
        f" {_power(bounds['loss'])}{family}, final weights {_power(bounds['weights'])}, memory and"
        f" traffic {bounds['cost']:.0%} of what was predicted.{excluded_text(certificate)}"
    )


def excluded_text(certificate: dict[str, Any], limit: int = 6) -> str:
    """Which weights were not compared, and why; empty if all were. Begins with a space."""
    excluded = certificate.get("excluded", [])
    if not excluded:
        return ""
    shown = [
        (
            weight["name"]
            if weight["elements"] == weight["of"]
            else f"{weight['name']} ({weight['elements']} of {weight['of']} elements)"
        )
        for weight in excluded[:limit]
    ]
    more = f", and {len(excluded) - limit} more (see --json)" if len(excluded) > limit else ""
    return (
        " Not compared are the weights whose gradient stayed below 1e-6 of the largest tensor's in"
        f" every step of {certificate['reference']}, which is rounding: {', '.join(shown)}{more}."
    )


def certificate_page(certificate: dict[str, Any]) -> dict[str, Any]:
    """What the page and the section of the report show of a certificate."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(certificate["time"]))
    return {
        "model": str(certificate["model"]),
        "ok": bool(certificate["ok"]),
        "subtitle": " · ".join(
            str(part) for part in (certificate["task"], *certificate["dataset"], when)
        ),
        "summary": summary(certificate),
        "when": when,
        "rows": rows(certificate),
    }

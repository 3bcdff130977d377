"""The certificate of ``paceline verify``: content, table, summary and page."""

import time
from typing import TypedDict

from paceline.core.files import human_bytes
from paceline.messages.pages import PageText


class ByteCounts(TypedDict):
    """Declared and measured bytes; None if the mode did not run."""

    predicted: int | None
    measured: int | None


class LeftOut(TypedDict):
    """A weight; ``elements`` of its ``of`` elements are not compared, because their gradient is at
    most ``gradient_ratio`` of the largest tensor's gradient."""

    name: str
    gradient_ratio: float
    elements: int
    of: int


class BoundsReport(TypedDict):
    """The bounds of a certificate; see :class:`paceline.verify.certificate.Bounds`."""

    loss: float
    weights: float
    family: float | None
    cost: float
    floor: float


class ModeCertificate(TypedDict):
    """The result of one mode."""

    mode: str
    ok: bool | None
    loss_rel_diff: float | None
    weight_rel_diff: float | None
    state_bytes: ByteCounts
    traffic_bytes: ByteCounts
    relative_step_time: float | None
    reason: str | None
    layout: str
    step_time_s: float | None
    final_loss: float | None
    worst_tensor: str | None
    loss_rel_diff_ddp: float | None


class Certificate(TypedDict):
    """The content of ``verify.json``."""

    world_size: int
    reference: str
    ok: bool
    modes: list[ModeCertificate]
    steps: int
    device: str
    precision: str
    optim: str
    global_batch_size: int
    bounds: BoundsReport
    excluded: list[LeftOut]
    model: str
    task: str
    dataset: list[str]
    time: float


def rows(certificate: Certificate) -> list[dict[str, str]]:
    """Return the modes as text for a table. ``verdict`` is "ok", "not ok" or "refused"."""
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
    """Format a power of ten as ``1e-5``, without a leading zero in the exponent."""
    return f"{value:.0e}".replace("e-0", "e-")


def _both(value: ByteCounts) -> str:
    if value["measured"] is None or value["predicted"] is None:
        return "–"
    predicted, measured = human_bytes(value["predicted"]), human_bytes(value["measured"])
    number, _, unit = predicted.rpartition(" ")
    return f"{number if measured.endswith(unit) else predicted} → {measured}"


def summary(certificate: Certificate) -> str:
    """Return the result, the settings and the bounds as text."""
    bounds, modes = certificate["bounds"], certificate["modes"]
    passed = sum(1 for mode in modes if mode["ok"])
    tried = sum(1 for mode in modes if mode["ok"] is not None)
    if not tried:
        return PageText(
            "No mode was compared with {reference}: all were refused.",
            reference=certificate["reference"],
        )
    family: str = ""
    if bounds["family"] is not None:
        family = PageText(
            " (between ddp, zero1, zero2 and zero3: {bound})", bound=_power(bounds["family"])
        )
    get = certificate.__getitem__
    return PageText(
        "{passed} of {tried} modes agree with {reference}: {steps} steps of {optim} in precision"
        " {precision} on {ranks} × {device}, global batch {batch}, dropout off. Relative bounds:"
        " losses {loss}{family}, final weights {weights}, memory and traffic {cost} of the"
        " prediction.{excluded}",
        passed=passed,
        tried=tried,
        reference=get("reference"),
        steps=get("steps"),
        optim=get("optim"),
        precision=get("precision"),
        ranks=get("world_size"),
        device=get("device"),
        batch=get("global_batch_size"),
        loss=_power(bounds["loss"]),
        family=family,
        weights=_power(bounds["weights"]),
        cost=f"{bounds['cost']:.0%}",
        excluded=excluded_text(certificate),
    )


def excluded_text(certificate: Certificate) -> str:
    """Return a sentence about the weights that were not compared, beginning with a space, or an
    empty string if all were compared. Their names are in the JSON only."""
    excluded = certificate.get("excluded", [])
    if not excluded:
        return ""
    return PageText(
        " {elements:weight} in {tensors:tensor} are not compared (`--json` lists them): in every"
        " step their gradient stayed below 1e-6 of the largest tensor's gradient, which is rounding"
        " error.",
        elements=sum(weight["elements"] for weight in excluded),
        tensors=len(excluded),
    )


class CertificatePage(TypedDict):
    """The template values of a certificate."""

    model: str
    ok: bool
    subtitle: str
    summary: str
    when: str
    rows: list[dict[str, str]]


def certificate_page(certificate: Certificate) -> CertificatePage:
    """Return the template values for the page of a certificate and for its section in the
    report."""
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

"""The certificate: the bounds, and the comparison of each mode with the reference. Imports no
torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

from paceline.config.schema import Config
from paceline.core.files import human_bytes
from paceline.core.formatting import counted, finite
from paceline.observe.report.certificate import ByteCounts, LeftOut, ModeCertificate

REFERENCE = "single"
#: The modes that differ from `ddp` only in the placement of state or micro-batches.
FAMILY = ("ddp", "ddp-balance", "zero1", "zero1-balance", "zero2", "zero3")
#: Bytes per step that no strategy declares: the token counts that the training loop sums over the
#: ranks, and the gradient norm.
LOOP_BYTES = 256


@dataclass(frozen=True)
class Bounds:
    """The largest accepted differences.

    Args:
        loss: tolerance of the loss of any step, relative to the reference.
        weights: tolerance of the final weights, see :func:`weight_difference`.
        family: as ``loss``, between `ddp` and zero1, zero2, zero3; None if it is not checked.
        cost: tolerance of measured bytes, relative to the prediction.
        floor: see :func:`weight_difference`.
    """

    loss: float
    weights: float
    family: float | None
    cost: float = 0.02
    floor: float = 1e-2


def bounds_for(config: Config, device_type: str) -> Bounds:
    """Return the bounds for a precision and a device.

    In float32 on a CPU only the order of sums differs, by 2^-24 per sum, which twenty updates of
    AdamW amplify. Accelerators choose other kernels for other shapes (and TF32 if it is on). Under
    bfloat16 and float16 each result is rounded to 2^-9 or 2^-12, at different places in each
    strategy; small tensors are then compared relative to the size of the others, see
    :func:`weight_difference`. 8-bit optimizers quantize other blocks if a strategy divides tensors
    in another way."""
    args = config.train_args
    if args.mixed_dtype or args.weight_dtype != "float32":
        return Bounds(loss=2e-2, weights=5e-2, family=None, floor=1.0)
    if "8bit" in args.optim:
        return Bounds(loss=1e-3, weights=5e-2, family=None)
    if device_type == "cpu":
        return Bounds(loss=1e-5, weights=1e-3, family=1e-6)
    return Bounds(loss=1e-4, weights=1e-2, family=None)


class RankTrialResult(TypedDict, total=False):
    """The result of a trial on one rank: ``status`` done, refused (with a ``reason``), idle (the
    rank takes no part) or stopped."""

    status: Required[str]
    reason: str
    losses: list[float]
    step_time_s: float
    state_predicted: float
    state_measured: float
    traffic_predicted: float
    traffic_measured: float
    weights: dict[str, list[float]]
    excluded: list[LeftOut]
    notices: list[str]


class TrialResult(TypedDict, total=False):
    """The result of a trial over all ranks: ``status`` done, or refused or failed with a
    ``reason``."""

    status: Required[str]
    reason: str
    losses: list[float]
    step_time_s: float
    weight_rel_diff: float
    worst_tensor: str | None
    missing: list[str]
    excluded: list[LeftOut]
    notices: list[str]
    state_bytes: ByteCounts
    traffic_bytes: ByteCounts


def combine(ranks: Sequence[RankTrialResult], floor: float = 1e-2) -> TrialResult:
    """Combine the results of a mode's ranks, ignoring idle ones."""
    ranks = [rank for rank in ranks if rank["status"] != "idle"]
    for rank in ranks:
        if rank["status"] == "refused":
            return {"status": "refused", "reason": rank["reason"]}
    difference, tensor, missing = weight_difference([rank["weights"] for rank in ranks], floor)
    return {
        "status": "done",
        "losses": ranks[0]["losses"],
        "step_time_s": max(rank["step_time_s"] for rank in ranks),
        "weight_rel_diff": difference,
        "worst_tensor": tensor,
        "missing": missing,
        "excluded": ranks[0].get("excluded", []),
        "notices": list(dict.fromkeys(text for rank in ranks for text in rank["notices"])),
        "state_bytes": {
            "predicted": round(max(rank["state_predicted"] for rank in ranks)),
            "measured": round(max(rank["state_measured"] for rank in ranks)),
        },
        "traffic_bytes": {
            "predicted": round(max(rank["traffic_predicted"] for rank in ranks)),
            "measured": round(max(rank["traffic_measured"] for rank in ranks)),
        },
    }


def weight_difference(
    ranks: Sequence[dict[str, list[float]]], floor: float = 1e-2
) -> tuple[float, str | None, list[str]]:
    """Return the largest ‖w - r‖ / ‖r‖ of all tensors, that tensor, and the tensors whose elements
    are not owned by exactly one rank each.

    Norms are compared, not elements: Adam divides a gradient by its size, so if a gradient is only
    rounding (nearly 0), an element moves by up to the learning rate in a direction that the order
    of sums decides. For the same reason ‖r‖ is at least ``floor`` times the norm that the tensor
    would have at the model's root mean square: a bias that starts at 0 has hardly any size yet.
    """
    names = list(ranks[0])
    squares, elements = (sum(ranks[0][name][place] for name in names) for place in (2, 3))
    min_rms = floor * math.sqrt(squares / elements) if elements else 0.0
    worst, tensor, missing = 0.0, None, []
    for name in names:
        difference, owned = (sum(rank[name][place] for rank in ranks) for place in (0, 1))
        norm, count, *compared = ranks[0][name][2:]
        if owned != count:
            missing.append(name)
        size = max(math.sqrt(norm), min_rms * math.sqrt(compared[0] if compared else count))
        relative = math.inf if difference else 0.0
        if size:
            relative = math.sqrt(difference) / size
        if not relative <= worst:  # NaN too
            worst, tensor = relative, name
            if math.isnan(relative):
                break
    return worst, tensor, missing


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |loss - reference| / |reference| of all steps; NaN if a loss is NaN."""
    worst = 0.0
    for loss, expected in zip(losses, reference, strict=True):
        relative = abs(loss - expected) / abs(expected) if expected else abs(loss)
        if math.isnan(relative):
            return math.nan
        worst = max(worst, relative)
    return worst


def not_run(mode: str, layout: str, ok: bool | None, reason: str) -> ModeCertificate:
    """Return the report of a mode that was refused (``ok`` None) or that failed (False)."""
    return ModeCertificate(
        mode=mode,
        ok=ok,
        loss_rel_diff=None,
        weight_rel_diff=None,
        state_bytes={"predicted": None, "measured": None},
        traffic_bytes={"predicted": None, "measured": None},
        relative_step_time=None,
        reason=reason,
        layout=layout,
        step_time_s=None,
        final_loss=None,
        worst_tensor=None,
        loss_rel_diff_ddp=None,
    )


def evaluate_mode(
    mode: str,
    layout: str,
    trial: TrialResult,
    reference: TrialResult,
    ddp: TrialResult | None,
    bounds: Bounds,
) -> ModeCertificate:
    """Compare a mode's result with the reference, with `ddp` if that ran, and with the mode's
    prediction. JSON has no NaN: such a figure is None, and the reason says so."""
    loss = loss_difference(trial["losses"], reference["losses"])
    from_ddp = loss_difference(trial["losses"], ddp["losses"]) if ddp else None
    reasons = _reasons(trial, loss, from_ddp if mode in FAMILY else None, bounds)
    return ModeCertificate(
        mode=mode,
        ok=not reasons,
        loss_rel_diff=finite(loss),
        weight_rel_diff=finite(trial["weight_rel_diff"]),
        state_bytes=trial["state_bytes"],
        traffic_bytes=trial["traffic_bytes"],
        relative_step_time=trial["step_time_s"] / ddp["step_time_s"] if ddp else None,
        reason="; ".join(reasons) or None,
        layout=layout,
        step_time_s=trial["step_time_s"],
        final_loss=finite(trial["losses"][-1]),
        worst_tensor=trial["worst_tensor"],
        loss_rel_diff_ddp=finite(from_ddp),
    )


def _reasons(trial: TrialResult, loss: float, from_ddp: float | None, bounds: Bounds) -> list[str]:
    """Return which bounds are exceeded. ``not x <= bound`` is true for NaN too."""
    reasons = []
    if not loss <= bounds.loss:
        reasons.append(f"the losses differ by {loss:.1e}, more than {bounds.loss:g}")
    weights = trial["weight_rel_diff"]
    if not weights <= bounds.weights:
        worst = _short(trial["worst_tensor"])
        reasons.append(
            f"the weights differ by {weights:.1e} ({worst}), more than {bounds.weights:g}"
        )
    if trial["missing"]:
        names = ", ".join(map(_short, trial["missing"][:3]))
        reasons.append(
            f"{counted(len(trial['missing']), 'weight')} not owned by exactly one rank ({names})"
        )
    family = bounds.family
    if family is not None and from_ddp is not None and not from_ddp <= family:
        reasons.append(f"the losses differ from ddp's by {from_ddp:.1e}, more than {family:g}")
    for name, count, slack in (
        ("state", trial["state_bytes"], 0),
        ("traffic", trial["traffic_bytes"], LOOP_BYTES),
    ):
        predicted, measured = count["predicted"] or 0, count["measured"] or 0
        if abs(measured - predicted) > bounds.cost * predicted + slack:
            share = f" ({measured / predicted - 1:+.1%})" if predicted else ""
            reasons.append(
                f"measured {name} is {human_bytes(measured)}, predicted"
                f" {human_bytes(predicted)}{share}"
            )
    return reasons


def _short(name: str | None) -> str:
    return (name or "").removeprefix("model/")

"""The spellings of the precision setting, Paceline's and other tools', and how several of them in
one config agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, as_bool, is_off
from paceline.config.compat.merge import RESET, Assignment, Merge
from paceline.config.entries import OVERRIDE, ConfigEntry, Problem, short

TARGET = "train_args.precision"
#: Pseudo-targets: keys that take part in the decision, each with its own precedence.
BF16, FP16, DTYPE, MIXED = "_bf16", "_fp16", "_dtype", "_mixed_precision"

_BF16_NAMES = ("bf16", "bfloat16", "bf16-mixed", "bf16_mixed")
_FP16_NAMES = ("fp16", "float16", "half", "16", "16-mixed", "fp16-mixed", "fp16_mixed")
_FLOAT32_NAMES = ("32", "fp32", "float32", "float", "32-true", "fp32-true", "single")
_ALLOWED = "use auto, bf16-mixed, fp16-mixed or 32"


def _mixed(value: Any) -> str | None:
    """The value of ``train_args.precision`` that a spelling stands for; None if it is not a
    spelling of one."""
    name = str(value).lower().removeprefix("torch.")
    if name == "auto":
        return "auto"
    for result, names in (
        ("bf16-mixed", _BF16_NAMES),
        ("fp16-mixed", _FP16_NAMES),
        ("32", _FLOAT32_NAMES),
    ):
        if name in names:
            return result
    return None


def precision(value: Any) -> Conversion:
    """``train_args.precision``, which also takes PyTorch Lightning's spellings."""
    result = None if isinstance(value, bool) else _mixed(value)
    if result is not None:
        return Conversion({TARGET: result})
    name = str(value).lower()
    if name in ("bf16-true", "16-true", "fp16-true"):
        raise UnsupportedValue(
            f"`{name}` (trained weights in half precision) is not supported", _ALLOWED
        )
    if (
        name in ("64", "64-true", "transformer-engine", "transformer-engine-float16")
        or "fp8" in name
    ):
        raise UnsupportedValue(f"`{name}` is not a precision that Paceline trains in", _ALLOWED)
    return Conversion({TARGET: value})  # the schema lists what it takes


def dtype(value: Any) -> Conversion:
    """``torch_dtype`` and its other names: the type that a tool loads the model in."""
    result = _mixed(value)
    if result is None:
        raise UnsupportedValue(
            f"`{value}` is not a precision", "use auto, bfloat16, float16 or float32"
        )
    return Conversion({DTYPE: result})


def mixed_precision(value: Any) -> Conversion:
    """Accelerate's ``mixed_precision``: ``no``, ``fp16``, ``bf16``, ``fp8``."""
    if is_off(value):
        return Conversion({MIXED: "32"})
    result = _mixed(value)
    if result is None:
        raise UnsupportedValue(
            f"`{value}` is not a precision that Paceline trains in", "use no, fp16 or bf16"
        )
    return Conversion({MIXED: result})


def bf16(value: Any) -> Conversion:
    return Conversion({BF16: True if value == "full" else _flag(value)})


def pure_bf16(value: Any) -> Conversion:
    """Trained weights in bfloat16, which is not supported yet."""
    flag = _flag(value)
    says = (
        (
            (
                "warning",
                "trained weights and optimizer states stay in float32, which takes more memory",
            ),
        )
        if flag is True
        else ()
    )
    return Conversion({BF16: flag}, says=says)


def fp16(value: Any) -> Conversion:
    return Conversion({FP16: _flag(value)})


def _flag(value: Any) -> bool | str:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    words = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}
    result = words.get(str(value).lower(), as_bool(value))
    if not isinstance(result, bool):
        raise UnsupportedValue(
            f"expected true, false or auto, got {short(value)}",
            "set `train_args.precision` instead: " + _ALLOWED[4:],
        )
    return result


# -- several keys
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    """A key that asks for a precision. ``firm``: it prevails over the other claims of its layer."""

    value: Any
    by: Assignment
    firm: bool

    @property
    def layer(self) -> int:
        return self.by.entry.layer


def settle_precision(merge: Merge) -> None:
    """Replace the pseudo-targets by one value of ``train_args.precision``.

    The command line prevails over the file. Within one layer a key that names a precision prevails
    over ``auto``, and that over ``float32`` as the type a model is loaded in; two keys that name
    different ones are a problem. ``bf16: false`` alone means float32; ``fp16: false`` alone changes
    nothing.
    """
    keys = {name: merge.winners.pop(name, None) for name in (TARGET, MIXED, DTYPE, BF16, FP16)}
    present = {
        name: one for name, one in keys.items() if one is not None and one.value is not RESET
    }
    native = keys[TARGET]
    if native is not None and native.value is RESET:
        present = {name: one for name, one in present.items() if one.entry.layer == OVERRIDE}
    off = {
        flag: present[flag]
        for flag in (BF16, FP16)
        if flag in present and present[flag].value is False
    }
    claims = [
        claim
        for claim in map(_claim, present.items())
        if claim is not None and not _turned_off(claim, off)
    ]
    chosen = _choose(merge, claims)
    if chosen is not None and _contradicted(merge, chosen, off):
        return
    if BF16 in off and (
        chosen is None or (chosen.value == "auto" and chosen.layer <= off[BF16].entry.layer)
    ):
        chosen = _Claim("32", off[BF16], firm=False)
    if chosen is not None:
        merge.winners[TARGET] = Assignment(TARGET, chosen.value, chosen.by.entry)
    elif native is not None:
        merge.winners[TARGET] = native
    _report(merge, keys, chosen)
    merge.drop_overridden_problems()


def _claim(item: tuple[str, Assignment]) -> _Claim | None:
    name, by = item
    value = by.value
    if name in (BF16, FP16):
        if value is False:
            return None
        value = "auto" if value == "auto" else "bf16-mixed" if name == BF16 else "fp16-mixed"
    firm = value != "auto" and not (name in (DTYPE, MIXED) and value == "32")
    return _Claim(value, by, firm)


def _turned_off(claim: _Claim, off: dict[str, Assignment]) -> bool:
    """True if a later layer has ``bf16: false`` for a claim of bf16, or ``fp16: false`` for one of
    fp16."""
    flag = off.get({"bf16-mixed": BF16, "fp16-mixed": FP16}.get(str(claim.value), ""))
    return flag is not None and flag.entry.layer > claim.layer


def _choose(merge: Merge, claims: list[_Claim]) -> _Claim | None:
    if not claims:
        return None
    top = [claim for claim in claims if claim.layer == max(claim.layer for claim in claims)]
    firm = [claim for claim in top if claim.firm]
    for other in firm[1:]:
        if other.value != firm[0].value:
            _problem(merge, firm[0].by, other.by)
    return (firm or [claim for claim in top if claim.value == "auto"] or top)[0]


def _contradicted(merge: Merge, chosen: _Claim, off: dict[str, Assignment]) -> bool:
    flag = off.get({"bf16-mixed": BF16, "fp16-mixed": FP16}.get(str(chosen.value), ""))
    if flag is None or chosen.by.target == DTYPE or flag.entry.layer != chosen.layer:
        return False
    _problem(merge, chosen.by, flag)
    return True


def _problem(merge: Merge, first: Assignment, second: Assignment) -> None:
    pair = sorted((first.entry, second.entry), key=lambda entry: entry.line or 0)
    shown = " and ".join(f"{entry.shown()} ({entry.place()})" for entry in pair)
    what = f"{shown} disagree: both set `{TARGET}`; choose one"
    merge.problems.append(Problem(what, pair[1], fix="keep one of the two", target=TARGET))


def _report(merge: Merge, keys: dict[str, Assignment | None], chosen: _Claim | None) -> None:
    """Say of each key what it was read as; nothing of a flag that is false and decides nothing."""
    for line in list(merge.lines):
        targets = {one.target for one in line.assigned} & {TARGET, MIXED, DTYPE, BF16, FP16}
        if not targets or line.assigned[0].target == TARGET:
            continue
        mine = next(one for one in line.assigned if one.target in targets)
        claim, winner = _claim((mine.target, mine)), _winner(keys, mine)
        if claim is None and (chosen is None or chosen.by is not mine):
            merge.lines.remove(line)
        elif winner.layer > mine.entry.layer:
            line.settled.append(("info", f"gives way to the command line: {winner.shown()}"))
        elif (
            chosen is None
            or (claim is not None and claim.value == chosen.value)
            or chosen.by is mine
        ):
            value = chosen.value if chosen is not None else "auto"
            line.settled.append(("info", f"is read as `{TARGET}: {value}`"))
        elif chosen.layer > mine.entry.layer:
            line.settled.append(
                ("info", f"gives way to the command line: {chosen.by.entry.shown()}")
            )
        else:
            line.settled.append(("info", f"gives way to {chosen.by.entry.shown()}"))


def _winner(keys: dict[str, Assignment | None], mine: Assignment) -> ConfigEntry:
    """The entry that decides about the key of ``mine``: another spelling of it, or an override that
    resets the setting."""
    reset, same = keys[TARGET], keys[mine.target]
    if reset is not None and reset.value is RESET:
        return reset.entry
    return mine.entry if same is None else same.entry

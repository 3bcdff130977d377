"""How several keys of one config that name a precision agree."""

from dataclasses import dataclass
from typing import Any

from paceline.config.compat.merge import RESET, Assignment, Merge
from paceline.config.entries import OVERRIDE, ConfigEntry, Problem

TARGET = "train_args.precision"
#: Pseudo-targets: keys that take part in the decision, each with its own precedence.
BF16, FP16, DTYPE, MIXED = "_bf16", "_fp16", "_dtype", "_mixed_precision"


@dataclass(frozen=True)
class _Claim:
    """A key that asks for a precision. ``firm``: it prevails over the other claims of its layer."""

    value: Any
    by: Assignment
    firm: bool

    @property
    def layer(self) -> int:
        return self.by.entry.layer


def resolve_precision(merge: Merge) -> None:
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
            line.resolved.append(("info", f"is overridden by the command line: {winner.shown()}"))
        elif (
            chosen is None
            or (claim is not None and claim.value == chosen.value)
            or chosen.by is mine
        ):
            value = chosen.value if chosen is not None else "auto"
            line.resolved.append(("info", f"is read as `{TARGET}: {value}`"))
        elif chosen.layer > mine.entry.layer:
            line.resolved.append(
                ("info", f"is overridden by the command line: {chosen.by.entry.shown()}")
            )
        else:
            line.resolved.append(("info", f"is overridden by {chosen.by.entry.shown()}"))


def _winner(keys: dict[str, Assignment | None], mine: Assignment) -> ConfigEntry:
    """The entry that decides about the key of ``mine``: another spelling of it, or an override that
    resets the setting."""
    reset, same = keys[TARGET], keys[mine.target]
    if reset is not None and reset.value is RESET:
        return reset.entry
    return mine.entry if same is None else same.entry

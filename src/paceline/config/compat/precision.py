"""Resolve several keys of one config that set a precision."""

from dataclasses import replace

from paceline.config.compat.merge import Merge
from paceline.config.compat.notices import overridden_remark, read_as_remark
from paceline.config.entries import OVERRIDE, ConfigEntry
from paceline.config.settings import RESET, Assignment

TARGET = "train_args.precision"
#: Pseudo-targets: keys that take part in the decision, each with its own precedence.
BF16, FP16, DTYPE, MIXED = "_bf16", "_fp16", "_dtype", "_mixed_precision"
PURE = "_pure_bf16"
#: Keys of ms-swift that select between LoRA and full fine-tuning.
_TUNERS = ("tuner_type", "train_type", "sft_type")
TARGETS = (TARGET, MIXED, DTYPE, BF16, FP16, PURE)


def resolve_precision(merge: Merge) -> None:
    """Replace the pseudo-targets by one value of ``train_args.precision``.

    The command line overrides the file. Within one layer, a key that names a precision overrides
    ``auto``, which overrides ``float32`` as the type that a model is loaded in; two keys that name
    different precisions are a problem. ``bf16: false`` alone means float32; ``fp16: false`` alone
    has no effect.
    """
    keys = {name: merge.winners.pop(name, None) for name in TARGETS}
    native = keys[TARGET]
    is_reset = native is not None and native.value is RESET
    present = {
        name: key
        for name, key in keys.items()
        if key is not None
        and key.value is not RESET
        and (key.entry.layer == OVERRIDE or not is_reset)
    }
    off = {
        flag: present[flag]
        for flag in (BF16, FP16)
        if flag in present and present[flag].value is False
    }
    if PURE in present:
        present.pop(BF16, None)  # set beside it in many configs, with the same meaning
        if merge.value_of("lora.enable") is True:
            present[PURE] = replace(present[PURE], value="bf16-mixed")
    dtype = present.get(DTYPE)
    if dtype is not None and dtype.value == "bf16-mixed" and _trains_loaded_weights(merge):
        present.pop(BF16, None)
        dtype.value = "bf16-true"
    loads_as_stored = BF16 in present and dtype is None and _trains_loaded_weights(merge)
    claims = [claim for key in present.values() if (claim := _claim(key))]
    chosen = _choose(merge, [claim for claim in claims if not _is_turned_off(claim, off)])
    flag = _flag_of(chosen, off)
    if chosen and flag and chosen.target != DTYPE and flag.entry.layer == chosen.entry.layer:
        _add_problem(merge, chosen, flag)
        return
    if BF16 in off and (
        chosen is None or (chosen.value == "auto" and chosen.entry.layer <= off[BF16].entry.layer)
    ):
        chosen = replace(off[BF16], value="32")
    if chosen is not None:
        merge.set_winner(TARGET, chosen.value, chosen)
    elif native is not None:
        merge.winners[TARGET] = native
    _report(merge, keys, chosen)
    if loads_as_stored and chosen is not None and chosen.value == "bf16-mixed":
        _explain_weights(merge)
    merge.drop_overridden_problems()


def _trains_loaded_weights(merge: Merge) -> bool:
    """Return whether this is a config of ms-swift for full fine-tuning without DeepSpeed, which
    would copy the weights to float32: ms-swift trains the weights in the type in which it loads
    them."""
    lora = merge.winners.get("lora.enable")
    return (
        lora is not None
        and lora.value is False
        and lora.entry.name in _TUNERS
        and not any(key.entry.name == "deepspeed" for key in merge.assigned)
    )


def _claim(key: Assignment) -> Assignment | None:
    """Return the precision that a key requests."""
    if key.target not in (BF16, FP16) or key.value == "auto":
        return key
    mixed = "bf16-mixed" if key.target == BF16 else "fp16-mixed"
    return None if key.value is False else replace(key, value=mixed)


def is_firm(claim: Assignment) -> bool:
    """Return whether a key overrides other keys of its layer."""
    is_load_type = claim.target in (DTYPE, MIXED) and claim.value == "32"
    return claim.value != "auto" and not is_load_type


def _flag_of(claim: Assignment | None, off: dict[str, Assignment]) -> Assignment | None:
    """Return ``bf16: false`` for a claim of bf16, or ``fp16: false`` for one of fp16, if set."""
    value = str(claim.value) if claim else ""
    return off.get({"bf16-mixed": BF16, "bf16-true": BF16, "fp16-mixed": FP16}.get(value, ""))


def _is_turned_off(claim: Assignment, off: dict[str, Assignment]) -> bool:
    flag = _flag_of(claim, off)
    return flag is not None and flag.entry.layer > claim.entry.layer


def _choose(merge: Merge, claims: list[Assignment]) -> Assignment | None:
    if not claims:
        return None
    layer = max(claim.entry.layer for claim in claims)
    top = [claim for claim in claims if claim.entry.layer == layer]
    firm = [claim for claim in top if is_firm(claim)]
    for other in firm[1:]:
        if other.value != firm[0].value:
            _add_problem(merge, firm[0], other)
    return (firm or [claim for claim in top if claim.value == "auto"] or top)[0]


def _add_problem(merge: Merge, first: Assignment, second: Assignment) -> None:
    earlier, later = sorted((first.entry, second.entry), key=lambda entry: entry.line or 0)
    merge.add_disagreement(earlier, later, f": both set `{TARGET}`; choose one", TARGET)


def _report(merge: Merge, keys: dict[str, Assignment | None], chosen: Assignment | None) -> None:
    """Report how each key was read, except a flag that is false and has no effect."""
    for line in list(merge.lines):
        assigned = next((item for item in line.assigned if item.target in TARGETS), None)
        if assigned is None or line.assigned[0].target == TARGET:
            continue
        claim, other = _claim(assigned), _winner(keys, assigned)
        is_chosen = chosen is not None and chosen.entry is assigned.entry
        if claim is None and not is_chosen:
            merge.lines.remove(line)
            continue
        layer = assigned.entry.layer
        if chosen and other.layer <= layer:
            agrees = is_chosen or (claim is not None and claim.value == chosen.value)
            other = assigned.entry if agrees else chosen.entry
        if other.layer > layer:
            text = f"is overridden by the command line: {other.shown()}"
        elif other is assigned.entry or chosen is None:
            text = read_as_remark(TARGET, chosen.value if chosen else "auto")
        else:
            text = overridden_remark(other)
        line.resolved.append(("info", text))


def _explain_weights(merge: Merge) -> None:
    """Report what `bf16: true` means in a config of ms-swift for full fine-tuning. It trains the
    weights in the dtype that the model's config.json names; `bf16` only turns on autocast."""
    for line in merge.lines:
        if any(item.target == BF16 for item in line.assigned) and line.resolved:
            level, text = line.resolved[-1]
            hint = "weights are float32; ms-swift trains them in the dtype of the model's files"
            hint += f", for which set `{TARGET}: bf16-true` if that is bfloat16"
            line.resolved[-1] = (level, f"{text}: {hint}")


def _winner(keys: dict[str, Assignment | None], assigned: Assignment) -> ConfigEntry:
    """Return the entry that decides about a key: another spelling of it, or an override that resets
    the setting."""
    reset, same = keys[TARGET], keys[assigned.target]
    if reset is not None and reset.value is RESET:
        return reset.entry
    return assigned.entry if same is None else same.entry

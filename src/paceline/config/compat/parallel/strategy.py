"""Combine all keys of other tools that choose a parallelism strategy, before the precedence of keys
is resolved.

`deepspeed`, `fsdp`, `fsdp_config`, `distributed_type` and similar keys only have a meaning
together, so :mod:`paceline.config.compat.parallel_values` keeps them under names with ``_`` in
front.
:func:`expand` replaces these by what they set: `parallel.mode`, its stage, its file, the offload,
the sizes of axes, and the values of a DeepSpeed JSON.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.config.compat.conversion import is_off
from paceline.config.compat.merge import Merge
from paceline.config.compat.notices import overridden_remark
from paceline.config.compat.parallel.context import combine_context_sizes
from paceline.config.compat.parallel.deepspeed import read_native_json, use_deepspeed
from paceline.config.compat.parallel.fsdp import use_fsdp, use_hsdp
from paceline.config.compat.parallel.keys import StrategyKeys, take_keys


def expand(merge: Merge, base: Path | None) -> None:
    """Replace the ``_`` names of parallelism in ``merge.assigned`` by what they set.

    Args:
        base: the config file's folder, which is also searched for a DeepSpeed JSON.
    """
    combine_context_sizes(merge)
    keys = take_keys(merge, base)
    for act in (_num_processes, _strategy, use_hsdp, read_native_json, _activation_offload):
        act(keys)


def _num_processes(keys: StrategyKeys) -> None:
    """Divide Accelerate's number of processes on all hosts by the hosts, for
    `parallel.num_gpus`."""
    key = keys.by_name.get("_num_processes")
    if key is None:
        return
    kind = keys.by_name.get("_distributed_type")
    is_single = kind is not None and kind.value == "NO" and kind.entry.layer >= key.entry.layer
    if is_single and not _names_strategy(keys):
        keys.add_notice(key.entry, "`distributed_type: NO` starts a single process")
        return
    hosts, count = keys.number("parallel.nnodes"), key.value
    if hosts == 1 or not isinstance(count, int) or isinstance(count, bool):
        keys.assign(key.entry, "parallel.num_gpus", count)
    elif count % hosts:
        why = f"{count} processes cannot be divided evenly over {hosts} hosts"
        keys.merge.refuse(key.entry, why, f"set a multiple of {hosts}", "parallel.num_gpus")
    else:
        keys.assign(key.entry, "parallel.num_gpus", count // hosts)
        keys.add_notice(key.entry, f"{count} processes on {hosts} hosts")


def _names_strategy(keys: StrategyKeys) -> bool:
    """Return whether a key besides `distributed_type` chooses a strategy."""
    values = [keys.value(name) for name in ("_deepspeed", "_fsdp")]
    return keys.native("parallel.mode") is not None or not all(map(is_off, values))


def _activation_offload(keys: StrategyKeys) -> None:
    """Add `activations` to what other keys offload."""
    key, mode = keys.by_name.get("_activation_offload"), keys.native("parallel.mode")
    if key is None:
        return
    if keys.number("parallel.pipeline") > 1 or (mode and mode.value in ("deepspeed", "pipeline")):
        keys.add_notice(key.entry, "activations are not offloaded with this strategy", "warning")
        return
    state = keys.native("parallel.cpu_offload")
    if state is not None and state.entry.layer > key.entry.layer:
        text = f"activations are not offloaded, because of {state.entry.shown()}"
        keys.add_notice(key.entry, text)
        return
    if state is None or state.value in ("none", "activations"):
        keys.assign(key.entry, "parallel.cpu_offload", "activations")
        return
    names = state.value if isinstance(state.value, list) else [state.value]
    if "activations" not in names:
        state.value = [*names, "activations"]
    line = keys.line(key.entry)
    if line is not None:
        line.assigned.append(state)


def _drop_overridden(keys: StrategyKeys) -> None:
    """Drop the file's DeepSpeed or FSDP if an override chooses the other."""
    chosen = [
        keys.by_name[name] for name in ("_deepspeed", "_fsdp") if not is_off(keys.value(name))
    ]
    if len({assigned.entry.layer for assigned in chosen}) != 2:
        return
    low, high = sorted(chosen, key=lambda assigned: assigned.entry.layer)
    family = "_fsdp" if low.target.startswith("_fsdp") else "_deepspeed"
    for name in [name for name in keys.by_name if name.startswith(family)]:
        if keys.by_name[name].entry.layer == low.entry.layer:
            keys.add_notice(keys.by_name.pop(name).entry, overridden_remark(high.entry))


def _strategy(keys: StrategyKeys) -> None:
    _drop_overridden(keys)
    kind = keys.value("_distributed_type")
    type_names = ["_distributed_type"] if kind in ("DEEPSPEED", "FSDP") else []
    wants_fsdp = "_fsdp" in keys.by_name and not is_off(keys.value("_fsdp"))
    fsdp_off = "_fsdp" in keys.by_name and not wants_fsdp
    fsdp_settings = [
        name for name in ("_fsdp_config", "_fsdp_version", "_fsdp_setting") if name in keys.by_name
    ]
    deepspeed = [name for name in ("_deepspeed", "_deepspeed_config") if name in keys.by_name]
    if kind not in (None, "DEEPSPEED") and "_deepspeed" not in deepspeed:
        why = f"it belongs to `distributed_type: DEEPSPEED`, and the type is {kind}"
        _add_notices(keys, deepspeed, why)
        deepspeed = []
    why_unused = ""
    if fsdp_off:
        why_unused = "`fsdp` is off"
    elif kind not in (None, "FSDP") and not wants_fsdp:
        why_unused = f"the type is {kind}"
    elif deepspeed and not wants_fsdp:
        why_unused = "DeepSpeed is used"
    if why_unused:
        _add_notices(keys, fsdp_settings, f"it belongs to FSDP, and {why_unused}")
        fsdp_settings = []
    if (deepspeed or kind == "DEEPSPEED") and (wants_fsdp or kind == "FSDP"):
        first = keys.by_name[deepspeed[0] if deepspeed else "_distributed_type"].entry
        second = keys.by_name["_fsdp" if wants_fsdp else "_distributed_type"].entry
        why = f"{second.located()} chooses another strategy"
        keys.merge.refuse(first, why, "keep one of the two", "parallel.mode")
    elif deepspeed or kind == "DEEPSPEED":
        use_deepspeed(keys, [*deepspeed, *type_names])
    elif wants_fsdp or fsdp_settings or kind == "FSDP":
        use_fsdp(keys, [*(["_fsdp"] if wants_fsdp else []), *fsdp_settings, *type_names])
    elif kind is not None:
        _type_only(keys, kind)
    if kind is not None and not type_names and (deepspeed or wants_fsdp):
        by = keys.by_name["_distributed_type"].entry
        keys.add_notice(by, "another key chooses the strategy")


def _add_notices(keys: StrategyKeys, names: Sequence[str], text: str) -> None:
    for name in names:
        keys.add_notice(keys.by_name[name].entry, text)


def _type_only(keys: StrategyKeys, kind: str) -> None:
    """Apply `distributed_type` if no other key chooses the strategy."""
    by, native = keys.by_name["_distributed_type"].entry, keys.native("parallel.mode")
    axes = [
        axis
        for axis in ("shard", "context", "tensor", "pipeline")
        if keys.number(f"parallel.{axis}") > 1
    ]
    if axes:
        keys.add_notice(by, f"the sizes of the axes ({', '.join(axes)}) choose the strategy")
    elif native is None or native.entry.layer != by.layer:
        keys.set_strategy(by, {"mode": {"NO": "single", "TP": "tensor"}.get(kind, "ddp")})
    else:
        keys.add_notice(by, overridden_remark(native.entry))

"""Parallelism strategies of other tools, put together from all their keys before the precedence of
keys is settled.

`deepspeed`, `fsdp`, `fsdp_config`, `distributed_type` and their like only mean something together,
so :mod:`paceline.config.compat.parallel.values` keeps them under names with ``_`` in front.
:func:`expand` replaces these by what they set: `parallel.mode`, its stage, its file, the offload,
the sizes of axes, and values that a DeepSpeed JSON has.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.config.compat.conversion import is_off
from paceline.config.compat.merge import Merge
from paceline.config.compat.parallel.deepspeed import read_native_json, use_deepspeed
from paceline.config.compat.parallel.fsdp import use_fsdp, use_hsdp
from paceline.config.compat.parallel.keys import StrategyKeys, take_keys


def expand(merge: Merge, base: Path | None) -> None:
    """Replace the ``_`` names of parallelism in ``merge.assigned`` by what they set.

    Args:
        base: the config file's folder, where a DeepSpeed JSON is looked for too.
    """
    keys = take_keys(merge, base)
    for act in (_num_processes, _strategy, use_hsdp, read_native_json):
        act(keys)


def _num_processes(keys: StrategyKeys) -> None:
    """Accelerate counts the processes of all hosts, `parallel.num_gpus` those of one."""
    given = keys.by_name.get("_num_processes")
    if given is None:
        return
    hosts, count = keys.number("parallel.nnodes"), given.value
    if hosts == 1 or not isinstance(count, int) or isinstance(count, bool):
        keys.assign(given.entry, "parallel.num_gpus", count)
    elif count % hosts:
        keys.refuse(
            given.entry,
            f"{count} processes do not divide into {hosts} hosts",
            "correct it",
            target="parallel.num_gpus",
        )
    else:
        keys.assign(given.entry, "parallel.num_gpus", count // hosts)
        keys.say(given.entry, f"{count} processes on {hosts} hosts")


def _drop_lower(keys: StrategyKeys) -> None:
    """Drop the file's DeepSpeed or FSDP where an override asks for the other."""
    chosen = [
        keys.by_name[name] for name in ("_deepspeed", "_fsdp") if not is_off(keys.value(name))
    ]
    if len({one.entry.layer for one in chosen}) != 2:
        return
    low, high = sorted(chosen, key=lambda one: one.entry.layer)
    family = "_fsdp" if low.target.startswith("_fsdp") else "_deepspeed"
    for name in [name for name in keys.by_name if name.startswith(family)]:
        if keys.by_name[name].entry.layer == low.entry.layer:
            keys.say(keys.by_name.pop(name).entry, f"is overridden by {high.entry.shown()}")


def _strategy(keys: StrategyKeys) -> None:
    _drop_lower(keys)
    kind = keys.value("_distributed_type")
    wants_fsdp = "_fsdp" in keys.by_name and not is_off(keys.value("_fsdp"))
    fsdp_off = "_fsdp" in keys.by_name and not wants_fsdp
    others = [
        name for name in ("_fsdp_config", "_fsdp_version", "_fsdp_setting") if name in keys.by_name
    ]
    deepspeed = [name for name in ("_deepspeed", "_deepspeed_config") if name in keys.by_name]
    if kind not in (None, "DEEPSPEED") and "_deepspeed" not in deepspeed:
        _inert(
            keys, deepspeed, f"it belongs to `distributed_type: DEEPSPEED`, and the type is {kind}"
        )
        deepspeed = []
    if (
        fsdp_off
        or (kind not in (None, "FSDP") and not wants_fsdp)
        or (deepspeed and not wants_fsdp)
    ):
        why = (
            "`fsdp` is off"
            if fsdp_off
            else f"the type is {kind}"
            if kind not in (None, "FSDP")
            else "DeepSpeed is used"
        )
        _inert(keys, others, f"it belongs to FSDP, and {why}")
        others = []
    if (deepspeed or kind == "DEEPSPEED") and (wants_fsdp or kind == "FSDP"):
        first = keys.by_name[deepspeed[0] if deepspeed else "_distributed_type"].entry
        second = keys.by_name["_fsdp" if wants_fsdp else "_distributed_type"].entry
        keys.refuse(
            first,
            f"{second.shown()} ({second.place()}) asks for another strategy",
            "keep one of the two",
        )
    elif deepspeed or kind == "DEEPSPEED":
        use_deepspeed(keys, [*deepspeed, *(["_distributed_type"] if kind == "DEEPSPEED" else [])])
    elif wants_fsdp or others or kind == "FSDP":
        use_fsdp(
            keys,
            [
                *(["_fsdp"] if wants_fsdp else []),
                *others,
                *(["_distributed_type"] if kind == "FSDP" else []),
            ],
        )
    elif kind is not None:
        _plain(keys, kind)
    if kind is not None and kind not in ("DEEPSPEED", "FSDP") and (deepspeed or wants_fsdp):
        keys.say(keys.by_name["_distributed_type"].entry, "the strategy is chosen by another key")


def _inert(keys: StrategyKeys, names: Sequence[str], why: str) -> None:
    for name in names:
        keys.say(keys.by_name[name].entry, why)


def _plain(keys: StrategyKeys, kind: str) -> None:
    """`distributed_type` alone."""
    by = keys.by_name["_distributed_type"].entry
    sizes = [
        target
        for target in ("shard", "tensor", "pipeline")
        if keys.number(f"parallel.{target}") > 1
    ]
    if sizes:
        keys.say(by, f"the sizes of the axes ({', '.join(sizes)}) choose the strategy")
        return
    modes = {"NO": "single", "TP": "tensor"}
    native = keys.native("parallel.mode")
    if native is None or native.weak or native.entry.layer != by.layer:
        keys.set_strategy(by, {"mode": modes.get(kind, "ddp")})
    else:
        keys.say(by, f"is overridden by {native.entry.shown()}")

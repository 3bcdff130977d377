"""Combine the keys of other tools for the number of ranks that a row of tokens is divided among.

Some tools divide a row twice and multiply both sizes. Others have two ways to divide it, and
a run uses one.
"""

from collections.abc import Mapping

from paceline.config.compat.merge import Merge
from paceline.config.entries import ConfigEntry
from paceline.config.settings import Assignment

_CONTEXT = "parallel.context"
_PREFIX = "parallelism_config_"
#: Keys whose sizes are multiplied by the tools that have both.
_FACTORS = ("ulysses_parallel_size", "ring_attention_size")
#: Two kinds of keys that no tool uses together in a run.
_CONTEXT_SIZES = ("cp_size", "context_parallel_size", "context_parallel_degree")
_SEQUENCE_SIZES = ("sp_size", "sequence_parallel_size")


def combine_context_sizes(merge: Merge) -> None:
    """Multiply the sizes of keys that belong together, and refuse those that do not. Called before
    the precedence of keys is resolved."""
    assigned = [each for each in merge.assigned if each.target == _CONTEXT]
    factors = [_strongest(assigned, name) for name in _FACTORS]
    _multiply(merge, assigned, [each for each in factors if each is not None])
    top = max((each.entry.layer for each in assigned), default=0)
    entries = [each.entry for each in assigned if each.entry.layer == top]
    first = next((each for each in entries if _names(each, _CONTEXT_SIZES)), None)
    second = next((each for each in entries if _names(each, _SEQUENCE_SIZES)), None)
    if first is not None and second is not None and first is not second:
        merge.refuse(
            second,
            f"{first.located()} divides rows too, and no tool multiplies the two",
            "keep one of the two, or set `parallel.context` to the number of ranks of a row",
            _CONTEXT,
        )


def _multiply(merge: Merge, assigned: list[Assignment], factors: list[Assignment]) -> None:
    values = [each.value for each in factors]
    if len(values) != 2 or not all(type(value) is int and value > 0 for value in values):
        return
    product = values[0] * values[1]
    top = max(each.entry.layer for each in factors)
    for each, other in zip(factors, reversed(factors), strict=True):
        for line in merge.lines:
            if line.entry is not each.entry:
                continue
            if each.entry.layer == top:
                line.notices.append(("info", f"times {other.entry.shown()}"))
            else:  # The other key, which overrides the file, sets the product.
                line.assigned = []
                line.resolved.append(("info", f"is a factor of `{_CONTEXT}: {product}`"))
    names = [each.entry.name for each in factors]
    for each in assigned:
        if each.entry.name in names:
            each.value = product


def _strongest(assigned: list[Assignment], name: str) -> Assignment | None:
    """Return the assignment of a key that overrides the others of this key."""
    named = [each for each in assigned if each.entry.name == name]
    return max(named, key=lambda each: each.entry.layer, default=None)


def _names(entry: ConfigEntry, names: tuple[str, ...]) -> bool:
    """Return whether an entry, or a key of its mapping, has one of these names."""
    keys = [entry.name]
    if isinstance(entry.value, Mapping):
        keys = [str(key) for key, value in entry.value.items() if value not in (None, 1, -1)]
    return any(key.removeprefix(_PREFIX) in names for key in keys)

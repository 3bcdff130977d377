"""Keys of other tools: which there are, what each is read as, and why some mean nothing here.

The tables are data: ``aliases.yaml`` (keys that are read as a key of ours) and ``ignored.yaml``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from paceline.config.compat import conversion, datasets, llamafactory, values
from paceline.config.compat.conversion import Convert, by_case, read_table
from paceline.config.compat.parallel import values as parallel_values

#: modules with the functions that ``convert`` names in ``aliases.yaml``
_CONVERTERS = {
    "": conversion,
    "datasets": datasets,
    "llamafactory": llamafactory,
    "parallel.values": parallel_values,
    "values": values,
}

TOOLS = {"s": "ms-swift", "l": "LLaMA-Factory", "a": "axolotl", "t": "TRL", "c": "Accelerate"}


@dataclass(frozen=True)
class Alias:
    """A key that is read as a key of ours.

    Args:
        target: the native key, dotted; the first one where a value sets several; empty where none
            is ever set.
        tools: letters of :data:`TOOLS`; empty where the key is Paceline's own and only some values
            are foreign.
        convert: from their value to ours.
        meaning: for the documentation, where it is more than a new name.
    """

    target: str
    tools: str
    convert: Convert
    meaning: str = ""


@dataclass(frozen=True)
class Ignored:
    """A key of other tools that means nothing here. ``level`` is ``warning`` where it would change
    what is trained."""

    tools: str
    level: str
    reason: str


@dataclass(frozen=True)
class AliasTables:
    """The sections of ``aliases.yaml``, each by key; see the comments there."""

    aliases: dict[str, Alias]
    sections: dict[str, Alias]
    shared: dict[str, Alias]
    shared_if_foreign: dict[str, Alias]


@dataclass(frozen=True)
class IgnoredTables:
    """``ignored.yaml``: entries by key, and by the beginning of a key."""

    keys: dict[str, Ignored] = field(default_factory=dict)
    prefixes: dict[str, Ignored] = field(default_factory=dict)


@cache
def alias_tables() -> AliasTables:
    """Read ``aliases.yaml``, once."""
    sections = read_table("aliases.yaml")
    return AliasTables(
        **{
            name: {key: _alias(**entry) for key, entry in entries.items()}
            for name, entries in sections.items()
        }
    )


def _alias(tools: str = "", target: str = "", convert: str = "to()", meaning: str = "") -> Alias:
    path, bracket, argument = convert.removesuffix(")").partition("(")
    module, _, name = path.rpartition(".")
    if not module and not bracket:
        return Alias(target, tools, by_case(name), meaning)
    function = getattr(_CONVERTERS[module], name)
    return Alias(target, tools, function(argument or target) if bracket else function, meaning)


@cache
def ignored_tables() -> IgnoredTables:
    """Read ``ignored.yaml``, once."""
    tables = IgnoredTables()
    for group in read_table("ignored.yaml"):
        for table, by_tools in (
            (tables.keys, group.get("keys", {})),
            (tables.prefixes, group.get("prefixes", {})),
        ):
            for tools, keys in by_tools.items():
                ignored = Ignored(tools, group["level"], group["reason"])
                table.update(dict.fromkeys(keys.split(), ignored))
    return tables


def alias_of(section: str, key: str) -> Alias | None:
    """The alias that ``key`` is in ``section`` (empty for the top level), or None.

    Aliases stand at the top level, under ``train_args``, or in the section they belong to.
    """
    tables = alias_tables()
    in_section = tables.sections.get(f"{section}.{key}")
    if in_section is not None:
        return in_section
    alias = tables.aliases.get(key)
    if alias is None:
        return None
    fits = (
        section in ("", "train_args") or not alias.target or alias.target.startswith(f"{section}.")
    )
    return alias if fits else None


def ignored_of(key: str) -> Ignored | None:
    """The entry of a key that means nothing here, or None."""
    tables = ignored_tables()
    return tables.keys.get(key) or next(
        (entry for prefix, entry in tables.prefixes.items() if key.startswith(prefix)), None
    )


def all_foreign() -> set[str]:
    """Every key of other tools that is known."""
    return set(alias_tables().aliases) | set(ignored_tables().keys)


def tool_scores(letters: Iterable[str]) -> dict[str, int]:
    """How many of the keys each tool knows; ``letters`` are the keys' tools."""
    scores = dict.fromkeys(TOOLS, 0)
    for known_by in letters:
        for letter in known_by:
            scores[letter] += 1
    return scores


def tool_names(letters: str, scores: dict[str, int]) -> str:
    """The tools a key may come from, likeliest first, two at most; one where the other keys decide
    it."""
    ranked = sorted(letters, key=lambda letter: -scores.get(letter, 0))
    best = max(scores.values(), default=0)
    leaders = [letter for letter in TOOLS if scores.get(letter) == best]
    if len(leaders) == 1 and leaders[0] in letters:
        return TOOLS[leaders[0]]
    return ", ".join(TOOLS[letter] for letter in ranked[:2])

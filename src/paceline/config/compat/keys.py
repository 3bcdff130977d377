"""Keys of other tools: which there are, what each is read as, and why some mean nothing here.

The tables are in :mod:`paceline.config.compat.aliases_table` (read as a key of ours) and
:mod:`paceline.config.compat.ignored_table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.config.compat.conversion import Convert

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


def alias_of(section: str, key: str) -> Alias | None:
    """The alias that ``key`` is in ``section`` (empty for the top level), or None.

    Aliases stand at the top level, under ``train_args``, or in the section they belong to.
    """
    from paceline.config.compat.aliases_table import ALIASES, SECTION_ALIASES

    own = SECTION_ALIASES.get(f"{section}.{key}")
    if own is not None:
        return own
    alias = ALIASES.get(key)
    if alias is None:
        return None
    fits = (
        section in ("", "train_args") or not alias.target or alias.target.startswith(f"{section}.")
    )
    return alias if fits else None


def ignored_of(key: str) -> Ignored | None:
    """The entry of a key that means nothing here, or None."""
    from paceline.config.compat.ignored_table import IGNORED, IGNORED_PREFIXES

    found = IGNORED.get(key)
    if found is not None:
        return found
    return next(
        (entry for prefix, entry in IGNORED_PREFIXES.items() if key.startswith(prefix)), None
    )


def all_foreign() -> set[str]:
    """Every key of other tools that is known."""
    from paceline.config.compat.aliases_table import ALIASES
    from paceline.config.compat.ignored_table import IGNORED

    return set(ALIASES) | set(IGNORED)


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

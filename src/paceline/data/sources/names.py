"""The names of sources in messages that are stored in the cache.

An entry of the cache depends on the content of its files, and not on their names: the messages of
an entry that was made from a copy of the files are shown with the names of the current files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.resolve import ResolvedSource

#: The label of a source, and the paths of its files.
SourceNames = list[str]


def names_of(sources: Sequence[ResolvedSource]) -> list[SourceNames]:
    """Return the names of each source, in an order that depends on the content only."""
    return [[source.label, *map(str, source.files)] for source in sources]


def with_names(
    notices: Sequence[Notice], stored: list[SourceNames], current: list[SourceNames]
) -> list[Notice]:
    """Return messages with the current names instead of the stored ones: labels at the start or in
    backticks, and paths also after a place, as in ``line 3 of PATH``."""
    if stored == current or list(map(len, stored)) != list(map(len, current)):
        return list(notices)
    labels = {old[0]: new[0] for old, new in zip(stored, current, strict=True)}
    paths = {
        old_path: new_path
        for old, new in zip(stored, current, strict=True)
        for old_path, new_path in zip(old[1:], new[1:], strict=True)
    }
    names = {**labels, **paths}
    pattern = re.compile(
        f"(?P<start>^|`)(?P<name>{_any(names)})(?P<end>`|: )"
        f"|(?P<before> of )(?P<path>{_any(paths)})(?=[),;]|$)"
    )

    def replace(match: re.Match[str]) -> str:
        if match["path"] is not None:
            return f"{match['before']}{paths[match['path']]}"
        return f"{match['start']}{names[match['name']]}{match['end']}"

    def renamed(text: str) -> str:
        shown = pattern.sub(replace, text)
        if not isinstance(text, UserText):
            return shown
        values = {
            name: names.get(value, value) if isinstance(value, str) else value
            for name, value in text.values.items()
        }
        return UserText.of(shown, text.code, values)

    return [Notice(level, renamed(text)) for level, text in notices]


def _any(names: dict[str, str]) -> str:
    """Return a pattern of any of the names, the longest first; of nothing without names."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"

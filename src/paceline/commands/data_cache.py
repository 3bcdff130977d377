"""`paceline data cache`: list what the cache contains, and delete what was not used recently."""

import json
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from paceline.commands.options import InvalidValue, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.files import cache_dir, human_bytes
from paceline.core.formatting import duration
from paceline.data.cache_entries import (
    KINDS,
    CacheEntry,
    delete_entry,
    list_entries,
    select_prunable,
)

_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class EntryReport(TypedDict):
    """An entry in the JSON of the command. ``is_pruned``: it was deleted; without `--prune`, it
    would be deleted."""

    kind: str
    path: str
    bytes: int
    unused_s: float
    is_used: bool
    is_pruned: bool


@dataclass(frozen=True)
class Amount:
    """A number and a unit, such as ``30d`` or ``50GB``. ``units``: the factor of each unit."""

    units: Mapping[str, int]
    example: str

    @property
    def allowed(self) -> str:
        return f"a number and a unit ({', '.join(self.units)}), such as {self.example}"

    def __call__(self, text: str) -> float:
        match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(self.units)})", text)
        if match is None:
            raise InvalidValue("is not a number and a unit", allowed=self.allowed)
        return float(match[1]) * self.units[match[2]]


def add_arguments(parser: OptionParser) -> None:
    parser.add_flag(
        "--prune", "delete the entries beyond the limits; entries that a process uses are kept"
    )
    parser.add_option(
        "--older-than", Amount(_SECONDS, "30d"), "AGE", "limit of the time since the last use"
    )
    parser.add_option(
        "--max-size",
        Amount(_BYTES, "50GB"),
        "SIZE",
        "limit of the total size; the least recently used entries are deleted first",
    )
    parser.example = "paceline data cache --prune --older-than 30d"


def run(args: Namespace) -> int:
    """List the entries, and delete those beyond the limits if asked to."""
    has_limit = args.older_than is not None or args.max_size is not None
    if args.prune and not has_limit:
        raise ConfigError(
            "`--prune` needs a limit",
            code="missing-limit",
            allowed="`--older-than AGE`, `--max-size SIZE`, or both",
            fix="add `--older-than 30d`",
        )
    entries = list_entries()
    selected = select_prunable(entries, args.older_than, args.max_size) if has_limit else []
    if args.prune:
        selected = [entry for entry in selected if delete_entry(entry)]
    print(json.dumps(_report(entries, selected)) if args.json else _text(entries, selected, args))
    return EXIT_DONE


def _report(
    entries: list[CacheEntry], selected: list[CacheEntry]
) -> dict[str, str | list[EntryReport]]:
    now = time.time()
    listed: list[EntryReport] = [
        {
            "kind": entry.kind,
            "path": str(entry.path),
            "bytes": entry.size_bytes,
            "unused_s": max(0.0, now - entry.used_at),
            "is_used": entry.is_used,
            "is_pruned": entry in selected,
        }
        for entry in entries
    ]
    return {"cache": str(cache_dir()), "entries": listed}


def _text(entries: list[CacheEntry], selected: list[CacheEntry], args: Namespace) -> str:
    lines = [f"{'kind':<11} {'entries':>7} {'size':>10}  {'unused for':<24} {'in use':>6}"]
    by_kind = {kind: [each for each in entries if each.kind == kind] for kind in KINDS}
    largest = sorted(by_kind.items(), key=lambda item: -sum(each.size_bytes for each in item[1]))
    for kind, members in largest:
        if members:
            size = human_bytes(sum(each.size_bytes for each in members))
            num_used = sum(each.is_used for each in members)
            lines.append(
                f"{kind:<11} {len(members):>7,} {size:>10}  {_ages(members):<24} {num_used:>6,}"
                f"  {KINDS[kind]}"
            )
    total = human_bytes(sum(entry.size_bytes for entry in entries))
    lines.append(f"{cache_dir()}: {_number(entries)}, {total}")
    if args.older_than is not None or args.max_size is not None:
        freed = human_bytes(sum(entry.size_bytes for entry in selected))
        number, used = _number(selected), [entry for entry in entries if entry.is_used]
        in_use = f"; {_number(used)} in use" if used else ""
        if args.prune:
            lines.append(f"deleted {number}, {freed}{in_use}")
        else:
            lines.append(f"`--prune` would delete {number}, {freed}{in_use}")
    return "\n".join(lines)


def _number(entries: Sequence[CacheEntry]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries):,} entries"


def _ages(entries: list[CacheEntry]) -> str:
    """Return how long the entries were not used, as a range."""
    now = time.time()
    ages = [max(0.0, now - entry.used_at) for entry in entries]
    low, high = duration(min(ages)), duration(max(ages))
    return low if low == high else f"{low} to {high}"

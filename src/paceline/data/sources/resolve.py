"""What `dataset:` may name: a file, a folder, a hub id, a well-known name, `builtin:NAME`; any of
them with `#N`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError, did_you_mean
from paceline.data.cache import fingerprint
from paceline.data.sources import hub, modelscope
from paceline.data.sources.builtin import builtin_dataset
from paceline.data.sources.opening import COMPRESSED_SUFFIXES, Position, data_suffix, take_count
from paceline.data.sources.readers import (
    KINDS,
    LineBlock,
    is_table,
    is_text,
    line_blocks,
    parse_lines,
    read_file,
    unknown_kind,
)

_NOT_DATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "license.txt",
    "license.md",
}
_ALLOWED = (
    f"a file ({KINDS}), a folder of them, a pattern such as data/*.jsonl.gz, a hub id such as"
    " tatsu-lab/alpaca, a well-known name such as alpaca-en, builtin:python-docs, and any of them"
    " as path#N"
)
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing"},
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Place = str
Notice = tuple[str, str]


@dataclass
class ResolvedSource:
    """One source whose place is known; reading it yields rows.

    Args:
        given: what the person wrote.
        files: local files, in order; empty for a hub dataset.
        hub: the hub dataset, or None.
        take: N of `path#N`, or None for all rows.
        notices: what the person should know, as (level, text).
        position: how much of the rows :meth:`parts` has read.
    """

    given: DatasetSource
    files: list[Path] = field(default_factory=list)
    hub: hub.HubDataset | None = None
    take: int | None = None
    notices: list[tuple[str, str]] = field(default_factory=list)
    position: Position = field(default_factory=Position)

    @property
    def label(self) -> str:
        return self.given.path

    def text_bytes(self) -> int | None:
        """About how many bytes of text there are to tokenize, for a guess at the work; None for a
        hub dataset."""
        if self.hub is not None:
            return None
        return sum(map(_text_bytes, self.files))

    def fingerprint(self) -> list[Any]:
        """What tells the rows of this source from any others'."""
        if self.hub is not None:
            return ["hub", *self.hub.fingerprint(), self.take]
        return [
            "files",
            [[data_suffix(one), *fingerprint(one)] for one in self.files],
            self.given.split,
            self.take,
        ]

    def rows(self, seed: int) -> Iterator[tuple[Place, Any]]:
        """(place, row) in order; with `#N` the first N of a shuffle that ``seed`` fixes, in the
        order of the file.

        Raises:
            ConfigError: a broken file.
        """
        if self.take is None:
            yield from self._all()
            return
        import numpy as np

        total = sum(1 for _ in self._all())
        if total < self.take:
            self.notices.append(
                (
                    "warning",
                    f"{self.label}: {self.take:,} rows asked for, it has {total:,}; all are used",
                )
            )
        chosen = set(np.random.default_rng(seed).permutation(total)[: self.take].tolist())
        for index, found in enumerate(self._all()):
            if index in chosen:
                yield found

    def parts(self, seed: int) -> Iterator[LineBlock | tuple[Place, Any]]:
        """The same rows as :meth:`rows`, in the same order, but blocks of lines where these can be
        parsed later.

        Raises:
            ConfigError: a broken file.
        """
        if self.hub is not None:
            yield from self.rows(seed)
        elif (take := self.take) is not None:
            number = 0
            self.position.follow(lambda: number / take)
            for number, found in enumerate(self.rows(seed), 1):  # noqa: B007
                yield found
        else:
            sizes = [_text_bytes(one) for one in self.files]
            for number, file in enumerate(self.files):
                inside = Position()
                self.position.follow(_share(sizes, number, inside))
                yield from line_blocks(file, inside) or self._of_file(file, inside)
        self.position.follow(lambda: 1.0)

    def _all(self) -> Iterator[tuple[Place, Any]]:
        if self.hub is not None:
            for number, row in enumerate(self.hub.rows(), 1):
                yield f"row {number:,} of {self.hub.repo}", row
            return
        for file in self.files:
            yield from self._of_file(file)

    def _of_file(self, file: Path, position: Position | None = None) -> Iterator[tuple[Place, Any]]:
        word = "line" if data_suffix(file) in (".jsonl", ".ndjson", ".csv", ".tsv") else "row"
        for number, row in read_file(file, self.given.split, self.notices, position):
            yield f"{word} {number} of {file}", row


def _text_bytes(file: Path) -> int:
    packed = (".parquet", ".arrow", *COMPRESSED_SUFFIXES)
    return file.stat().st_size * (3 if file.suffix.lower() in packed else 1)


def _share(sizes: list[int], number: int, inside: Position) -> Callable[[], float]:
    """The share of all files that was read, at ``inside`` of the file with the index ``number``."""
    return lambda: (sum(sizes[:number]) + sizes[number] * inside.share) / max(1, sum(sizes))


def rows_of_block(block: LineBlock) -> Iterator[tuple[Place, Any]]:
    """(place, row) of the lines in a block, as :meth:`ResolvedSource.rows` gives them.

    Raises:
        ConfigError: a broken line.
    """
    path = str(block.path)
    for number, row in parse_lines(block):
        yield f"line {number} of {path}", row


def open_source(given: DatasetSource) -> ResolvedSource:
    """Find what ``given`` names. Reads no rows.

    Raises:
        ConfigError: nothing of that name (with the nearest one there is), a folder without data, a
            hub dataset that cannot be had.
    """
    if not given.path.strip():
        raise ConfigError("`dataset` is empty", allowed=_ALLOWED)
    name, take = take_count(given.path)
    path = Path(name).expanduser()
    if name.startswith("builtin:"):
        return ResolvedSource(
            given, files=[builtin_dataset(name.removeprefix("builtin:"))], take=take
        )
    if name.startswith(modelscope.PREFIX):
        path = Path(modelscope.download(name, "dataset"))
    if path.is_dir():
        files, notices = _folder_files(path, given.split)
        return ResolvedSource(
            given, files=[_readable(one) for one in files], take=take, notices=notices
        )
    if path.exists():
        if not (is_table(path) or is_text(path)):
            raise unknown_kind(path)
        return ResolvedSource(given, files=[_readable(path)], take=take)
    if any(sign in name for sign in "*?["):
        files, notices = _matching_files(name)
        return ResolvedSource(
            given, files=[_readable(one) for one in files], take=take, notices=notices
        )
    return _elsewhere(given, name, path, take)


def _matching_files(pattern: str) -> tuple[list[Path], list[Notice]]:
    """The data files whose paths match ``pattern``, sorted, of one kind as in a folder: tables if
    there are any, else text."""
    matches = sorted(Path(one) for one in glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [one for one in matches if one.is_file()]
    data = [one for one in files if is_table(one)] or [one for one in files if is_text(one)]
    if not data:
        matched = _names(files) if files else "nothing"
        raise ConfigError(
            f"`{pattern}` matches no data files (it matches {matched}; looked from {Path.cwd()})",
            allowed=KINDS,
            fix="check the pattern; `**` also matches folders below",
        )
    notices = [("info", f"{pattern}: {len(data)} data files")]
    if len(data) < len(files):
        notices.append(
            ("info", f"{pattern}: passed over {_names([one for one in files if one not in data])}")
        )
    return data, notices


def check_hub_sources(config: Config) -> None:
    """Check that the hub answers for each dataset on it, or that the dataset was downloaded before.
    Makes no request.

    Raises:
        ConfigError: neither.
    """
    for given in [
        *config.sources(),
        *(config.sources(validation=True) if config.val_dataset is not None else []),
    ]:
        name = re.sub(r"#\d[\d_,]*$", "", given.path.strip())
        known = hub.find_hub_name(name)
        if Path(given.path).expanduser().exists() or Path(name).expanduser().exists():
            continue
        if known is not None or (_HUB_ID.fullmatch(name) and not _looks_like_file(name)):
            hub.HubDataset(name if known is None else known.repo, given.name, given.split).check()


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise ConfigError(
            f"`{path}` may not be read", fix=f"give yourself the right to: `chmod u+r {path}`"
        )
    return path


def _elsewhere(given: DatasetSource, name: str, path: Path, take: int | None) -> ResolvedSource:
    known = hub.find_hub_name(name)
    if known is not None:
        split = known.split if known.split and given.split == "train" else given.split
        dataset = hub.HubDataset(known.repo, given.name or known.name, split)
        notice = ("info", f"{name} is {known.repo} on the Hugging Face hub (split {split})")
        source = ResolvedSource(given, hub=dataset, take=take, notices=[notice])
    elif _HUB_ID.fullmatch(name) and not _looks_like_file(name):
        dataset = hub.HubDataset(name, given.name, given.split)
        source = ResolvedSource(given, hub=dataset, take=take)
    else:
        raise _no_such(name, path)
    source.notices.extend(dataset.find())
    return source


def _looks_like_file(name: str) -> bool:
    folder = Path(name).parent
    return is_table(Path(name)) or is_text(Path(name)) or (folder != Path(".") and folder.is_dir())


def _no_such(name: str, path: Path) -> ConfigError:
    folder = path.parent
    fix = "check the path"
    if folder.is_dir():
        if "/" not in name:
            fix = did_you_mean(name.lower(), hub.HUB_NAMES, fix)
        siblings = [entry.name for entry in folder.iterdir()]
        fix = did_you_mean(path.name, siblings, fix, f"`{folder / '{}'}`")
    else:
        missing = path
        while not missing.parent.is_dir():
            missing = missing.parent
        siblings = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
        question = did_you_mean(missing.name, siblings, form=f"`{missing.parent / '{}'}`")
        fix = f"the folder `{missing}` does not exist" + (f"; {question}" if question else "")
    what = f"there is no file, folder or known dataset `{name}` (looked from {Path.cwd()})"
    return ConfigError(what, allowed=_ALLOWED, fix=fix)


def _folder_files(folder: Path, split: str) -> tuple[list[Path], list[tuple[str, str]]]:
    """Data files below ``folder``, sorted; tables where there are any, else plain text; of named
    splits the one asked for."""
    every = sorted(
        one
        for one in folder.rglob("*")
        if one.is_file()
        and not any(part.startswith((".", "__")) for part in one.relative_to(folder).parts)
    )
    data = [
        one
        for one in every
        if one.name.lower() not in _NOT_DATA and not one.name.startswith("cache-")
    ]
    found = [one for one in data if is_table(one)] or [one for one in data if is_text(one)]
    if not found:
        names = ", ".join(one.name for one in every[:6]) or "nothing"
        raise ConfigError(
            f"the folder `{folder}` holds no data files (found: {names})", allowed=KINDS
        )
    notices = []
    by_split = {one: _split_of(one.relative_to(folder)) for one in found}
    wanted = next((key for key, words in _SPLITS.items() if split in words), split)
    if len({one for one in by_split.values() if one}) > 1 and wanted in by_split.values():
        left = [one for one in found if by_split[one] not in (wanted, None)]
        found = [one for one in found if by_split[one] in (wanted, None)]
        notices.append(("info", f"{folder}: split {wanted}; left out {_names(left)}"))
    others = [one for one in every if one not in by_split]
    if others:
        notices.append(("info", f"{folder}: {len(found)} data files; passed over {_names(others)}"))
    return found, notices


def _split_of(path: Path) -> str | None:
    words = re.split(r"[^a-z]+", str(path).lower())
    return next((split for split, names in _SPLITS.items() if names & set(words)), None)


def _names(files: list[Path]) -> str:
    return ", ".join(one.name for one in files[:4]) + (
        f" and {len(files) - 4} more" if len(files) > 4 else ""
    )

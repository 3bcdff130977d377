"""Find the data that `dataset:` names: a file, a folder, a pattern, a hub ID, a well-known name or
`builtin:NAME`, each optionally with `#N`."""

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
from paceline.core.formatting import printable
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.cache import fingerprint
from paceline.data.sources import hub
from paceline.data.sources.builtin import builtin_dataset, check_builtin_dataset
from paceline.data.sources.folder import LocalFolder, find_files, tables_or_texts
from paceline.data.sources.opening import (
    COMPRESSED_SUFFIXES,
    Position,
    Take,
    data_suffix,
    expand_braces,
    is_pattern,
    is_url,
    number_to_take,
    similar_path,
    take_count,
    windows_fix,
)
from paceline.data.sources.readers import (
    KINDS,
    LineBlock,
    is_table,
    is_text,
    line_blocks,
    parse_lines,
    read_file,
    row_unit,
    unknown_kind,
)
from paceline.data.sources.splits import check_split, shorten, split_kind, split_of_file

_ALLOWED = (
    f"a file ({KINDS}), a folder of them, a pattern such as data/*.jsonl.gz, a hub id such as"
    " tatsu-lab/alpaca, a well-known name such as alpaca-en, builtin:python-docs, or any of these"
    " as path#N or path#P%"
)

_MAX_NAME_CHARS = 500
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Place = str


@dataclass
class ResolvedSource:
    """One source that has been found; reading it yields rows.

    Args:
        spec: the entry of the config.
        files: local files, in order; empty for a hub dataset.
        hub: the hub dataset, or None.
        take: N of `path#N`, the share of `path#P%`, or None for all rows.
        notices: messages to log about the source.
        position: how much of the rows :meth:`parts` has read.
    """

    spec: DatasetSource
    files: list[Path] = field(default_factory=list)
    hub: hub.HubDataset | None = None
    take: Take | None = None
    notices: list[Notice] = field(default_factory=list)
    position: Position = field(default_factory=Position)

    @property
    def label(self) -> str:
        return self.spec.path

    def text_bytes(self) -> int | None:
        """Return the approximate number of bytes of text to tokenize; None for a hub dataset."""
        if self.hub is not None:
            return None
        return sum(map(_text_bytes, self.files))

    def fingerprint(self) -> list[Any]:
        """Return values that distinguish the rows of this source from the rows of any other."""
        if self.hub is not None:
            return ["hub", *self.hub.fingerprint(), self.take]
        return [
            "files",
            [[data_suffix(path), *fingerprint(path)] for path in self.files],
            self.spec.split,
            self.take,
        ]

    def rows(self, seed: int) -> Iterator[tuple[Place, Any]]:
        """Yield (place, row) in order. With `#N` or `#P%`, select the first rows of a shuffle that
        depends only on ``seed``, and yield them in file order.

        Raises:
            ConfigError: a file is malformed.
        """
        if self.take is None:
            yield from self._all_rows()
            return
        import numpy as np

        total = sum(1 for _ in self._all_rows())
        num_taken, number = number_to_take(self.take, total), 0
        if total < num_taken:
            text = UserText(
                "{label}: {num_taken} rows requested, but the dataset has {total}; using all"
                " of them",
                code="fewer-rows-than-requested",
                label=self.label,
                num_taken=f"{num_taken:,}",
                total=f"{total:,}",
            )
            self.notices.append(Notice("warning", text))
        chosen = set(np.random.default_rng(seed).permutation(total)[:num_taken].tolist())
        self.position.follow(lambda: number / max(1, num_taken))
        for index, row in enumerate(self._all_rows()):
            if index in chosen:
                number += 1
                yield row

    def parts(self, seed: int) -> Iterator[LineBlock | tuple[Place, Any]]:
        """Yield the rows of :meth:`rows` in the same order, as unparsed blocks of lines if the file
        allows it.

        Raises:
            ConfigError: a file is malformed.
        """
        if self.hub is not None or self.take is not None:
            yield from self.rows(seed)
        else:
            sizes = [_text_bytes(path) for path in self.files]
            for index, path in enumerate(self.files):
                in_file = Position()
                self.position.follow(_total_share(sizes, index, in_file))
                yield from line_blocks(path, in_file) or self._file_rows(path, in_file)
        self.position.follow(lambda: 1.0)

    def _all_rows(self) -> Iterator[tuple[Place, Any]]:
        if self.hub is not None:
            for number, row in enumerate(self.hub.rows(), 1):
                yield f"row {number:,} of {self.hub.repo}", row
        for path in self.files:
            yield from self._file_rows(path)

    def _file_rows(
        self, path: Path, position: Position | None = None
    ) -> Iterator[tuple[Place, Any]]:
        unit = row_unit(path)
        for number, row in read_file(path, self.spec.split, self.notices, position):
            yield f"{unit} {number} of {path}", row


def _text_bytes(file: Path) -> int:
    packed = (".parquet", ".arrow", *COMPRESSED_SUFFIXES)
    return file.stat().st_size * (3 if file.suffix.lower() in packed else 1)


def _total_share(sizes: list[int], index: int, in_file: Position) -> Callable[[], float]:
    """Return a function that computes the share of all files read so far, at position ``in_file``
    of the file with this index."""
    return lambda: (sum(sizes[:index]) + sizes[index] * in_file.share) / max(1, sum(sizes))


def rows_of_block(block: LineBlock) -> Iterator[tuple[Place, Any]]:
    """Yield (place, row) of the lines in a block, as :meth:`ResolvedSource.rows` does.

    Raises:
        ConfigError: a line is malformed.
    """
    path = str(block.path)
    for number, row in parse_lines(block):
        yield f"line {number} of {path}", row


def open_source(spec: DatasetSource, *, validation: bool = False) -> ResolvedSource:
    """Find the data that ``spec`` names. Reads no rows.

    Args:
        validation: whether the data are for validation: from a folder with a held-out split, this
            split is read unless the config names another.

    Raises:
        ConfigError: the name is unknown, a folder has no data files, or a hub dataset cannot be
            downloaded.
    """
    if not spec.path.strip():
        raise ConfigError("`dataset` is empty", code="empty-dataset-setting", allowed=_ALLOWED)
    name, take = take_count(spec.path)
    path = Path(name).expanduser()
    notices: list[Notice] = []
    if name.startswith("builtin:"):
        files = [builtin_dataset(name.removeprefix("builtin:"))]
        return ResolvedSource(spec, files=files, take=take, notices=unused_settings(spec, files))
    if name.startswith(hub.MODELSCOPE_PREFIX):
        path = Path(hub.download_from_modelscope(name, "dataset"))
    if is_url(name) and not path.exists():
        raise ConfigError(
            "`{name}` is a URL, which is supported only for `dataset` of a run that streams its"
            " data, and for a preview",
            code="url-without-streaming",
            allowed="a file or a folder of this host, or a hub id",
            fix="copy the files to this host, or for `dataset` set `streaming: true`",
            name=name,
        )
    if path.exists() or is_pattern(name):
        check_split(spec)
    if path.is_dir():
        names, notices = find_files(LocalFolder(path), spec, validation)
        files = [path / name for name in names]
    elif path.exists():
        if not (is_table(path) or is_text(path)):
            raise unknown_kind(path)
        files, notices = [path], unused_settings(spec, [path])
    elif is_pattern(name):
        files, notices = _matching_files(name)
        notices += unused_settings(spec, files)
    else:
        return _hub_source(spec, name, path, take)
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(
                "`{file}`: permission denied",
                code="permission-denied",
                fix="run `chmod u+r {file}`",
                file=file,
            )
    return ResolvedSource(spec, files=files, take=take, notices=notices)


def unused_settings(spec: DatasetSource, files: list[Path]) -> list[Notice]:
    """Return messages about `name` and `split` where the config names the files itself."""
    notices = []
    if spec.name not in (None, "default"):
        text = UserText(
            "{spec}: `name: {name}` has no effect, because `dataset` names files",
            code="name-without-effect",
            spec=spec.path,
            name=spec.name,
        )
        notices.append(Notice("warning", text))
    kind = split_kind(spec.split)
    others = [path for path in files if data_suffix(path) != ".json"]
    if kind != "train" and any(split_of_file(path.name) != kind for path in others):
        text = UserText(
            "{spec}: `split: {split}` has no effect, because `dataset` names files",
            code="split-with-files",
            spec=spec.path,
            split=spec.split,
        )
        notices.append(Notice("warning", text))
    return notices


def is_local(name: str) -> bool:
    """Return whether a source, without `#N`, is a built-in dataset, a pattern, or a local path that
    exists."""
    if name.startswith("builtin:") or is_pattern(name):
        return not is_url(name)
    return Path(name).expanduser().exists()


def _matching_files(pattern: str) -> tuple[list[Path], list[Notice]]:
    """Return the data files that match ``pattern``, sorted: tables if there are any, else text."""
    matches: list[Path] = []
    for part in expand_braces(os.path.expanduser(pattern)):
        paths = sorted(map(Path, glob.glob(part, recursive=True)))
        if not paths and part != os.path.expanduser(pattern):
            raise ConfigError(
                "`{part}` does not exist",
                code="missing-pattern-folder",
                fix="check the pattern `{pattern}`",
                part=part,
                pattern=pattern,
            )
        matches += paths
    files = [path for path in matches if path.is_file()]
    data = tables_or_texts(files)
    if not data:
        matched = shorten([path.name for path in files]) if files else "nothing"
        raise ConfigError(
            "`{pattern}` matches no data files (it matches {matched}; working directory {cwd})",
            code="no-matching-files",
            allowed=KINDS,
            fix="check the pattern; `**` also matches nested folders",
            pattern=pattern,
            matched=matched,
            cwd=Path.cwd(),
        )
    notices = [
        Notice(
            "info",
            UserText(
                "{pattern}: {num_data} data files",
                code="pattern-files",
                pattern=pattern,
                num_data=len(data),
            ),
        )
    ]
    root = os.path.dirname(re.split(r"[*?[{]", os.path.expanduser(pattern))[0])
    held_out = [
        path.name
        for path in data
        if split_of_file(os.path.relpath(path, root or ".")) not in (None, "train")
    ]
    if 0 < len(held_out) < len(data):
        text = UserText(
            "{pattern}: also matches held-out files by their names: {files}",
            code="held-out-files-matched",
            pattern=pattern,
            files=shorten(held_out),
        )
        notices.append(Notice("warning", text))
    skipped = [path.name for path in files if path not in data]
    if skipped:
        notices.append(
            Notice(
                "info",
                UserText(
                    "{pattern}: skipped {files}",
                    code="pattern-files-skipped",
                    pattern=pattern,
                    files=shorten(skipped),
                ),
            )
        )
    return data, notices


def check_hub_sources(config: Config) -> None:
    """Check that the hub responds for each dataset on it, or that the dataset was downloaded
    before. Downloads nothing.

    Raises:
        ConfigError: the hub does not respond and the dataset was not downloaded before.
    """
    for spec, name in _named_sources(config):
        dataset = _hub_dataset(spec, name)
        if dataset is not None:
            dataset.check()


def check_local_sources(config: Config) -> None:
    """Check that each dataset that is not elsewhere exists. Reads nothing.

    Raises:
        ConfigError: a file, a folder or a built-in dataset does not exist.
    """
    for spec, name in _named_sources(config):
        if is_url(name) or name.startswith(hub.MODELSCOPE_PREFIX):
            continue
        if name.startswith("builtin:"):
            check_builtin_dataset(name.removeprefix("builtin:"))
        elif is_pattern(name):
            _check_pattern(name)
        elif _hub_dataset(spec, name) is None:
            raise _not_found(name, Path(name).expanduser())


def _check_pattern(pattern: str) -> None:
    """Check that some file matches each part of ``pattern``, without listing them all."""
    for part in expand_braces(os.path.expanduser(pattern)):
        if next(glob.iglob(part, recursive=True), None) is None:
            _matching_files(pattern)  # raises an error that describes what is missing


def _named_sources(config: Config) -> Iterator[tuple[DatasetSource, str]]:
    """Yield each source that is not a path that exists, with its name without `#N`."""
    sources = config.sources()
    if config.val_dataset is not None:
        sources = [*sources, *config.sources(validation=True)]
    for spec in sources:
        name, _ = take_count(spec.path)
        if name.strip() and not any(Path(path).expanduser().exists() for path in (spec.path, name)):
            yield spec, name


def _hub_dataset(spec: DatasetSource, name: str) -> hub.HubDataset | None:
    """Return the hub dataset that a well-known name or a hub id stands for, or None."""
    alias = hub.find_hub_name(name)
    if alias is not None:
        split = alias.split if alias.split and spec.split == "train" else spec.split
        return hub.HubDataset(alias.repo, spec.name or alias.name, split)
    if _HUB_ID.fullmatch(name) and not _looks_like_file(name):
        return hub.HubDataset(name, spec.name, spec.split)
    return None


def _hub_source(spec: DatasetSource, name: str, path: Path, take: Take | None) -> ResolvedSource:
    dataset = _hub_dataset(spec, name)
    if dataset is None:
        raise _not_found(name, path)
    notices = []
    if name != dataset.repo:
        text = UserText(
            "{name} is {repo} on the Hugging Face hub (split {split})",
            code="dataset-on-hub",
            name=name,
            repo=dataset.repo,
            split=dataset.split,
        )
        notices.append(Notice("info", text))
    return ResolvedSource(spec, hub=dataset, take=take, notices=[*notices, *dataset.find()])


def _looks_like_file(name: str) -> bool:
    folder = Path(name).parent
    return is_table(Path(name)) or is_text(Path(name)) or (folder != Path(".") and folder.is_dir())


def _not_found(name: str, path: Path) -> ConfigError:
    path = Path(str(path).replace("\\", "/"))
    folder = path.parent
    fix = "check the path"
    if folder.is_dir():
        if "/" not in name:
            fix = did_you_mean(name.lower(), hub.HUB_NAMES, fix)
        fix = similar_path(path, fix)
    else:
        missing = path
        while not missing.parent.is_dir():
            missing = missing.parent
        siblings = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
        question = did_you_mean(missing.name, siblings, form=f"`{missing.parent / '{}'}`")
        fix = f"the folder `{missing}` does not exist" + (f"; {question}" if question else "")
    fix = windows_fix(name) or fix
    return ConfigError(
        "`{name}` is not a file, a folder or a known dataset (working directory {cwd})",
        code="missing-dataset-file",
        allowed=_ALLOWED,
        fix=fix,
        name=printable(name, _MAX_NAME_CHARS),
        cwd=Path.cwd(),
    )

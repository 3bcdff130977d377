"""Find the data files of a folder, local or at a URL, for a configuration and a split."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.card import CARD, CardConfig, choose_config, read_card, unknown_name
from paceline.data.sources.readers import KINDS, conversion_fix, is_table, is_text
from paceline.data.sources.splits import (
    choose_files,
    for_validation,
    shorten,
    split_kind,
    split_of_file,
)

_NOT_DATA = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "license.txt",
    "license.md",
}


class DataFolder(Protocol):
    """A folder with files. Their names are paths below it, with ``/``."""

    @property
    def label(self) -> str:
        """The name of the folder in messages."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    def matches(self, pattern: str) -> list[str]:
        """Return the names of the files that match a pattern, sorted."""

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if there is none."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this host, as :class:`DataFolder` describes it."""

    path: Path

    @property
    def label(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        files = (path for path in self.path.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.path).as_posix() for path in files)

    def matches(self, pattern: str) -> list[str]:
        names = sorted(glob.glob(pattern, root_dir=self.path, recursive=True))
        return [name for name in names if (self.path / name).is_file()]

    def read(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


def find_files(
    folder: DataFolder, spec: DatasetSource, validation: bool = False
) -> tuple[list[str], list[Notice]]:
    """Return the names of the data files of a folder, sorted, and messages about the others: tables
    if there are any, else plain text.

    The dataset card of the folder declares the files of its configurations and splits, as on the
    hub. Without a declaration, `name` is a subfolder, and the names of the files show the splits.

    Args:
        validation: whether the data are for validation: a held-out split is then the default.

    Raises:
        ConfigError: there are no data files, or no such configuration or split.
    """
    configs, notices = read_card(folder.read(CARD), folder.label)
    config, subfolder = None, "."
    if configs:
        config = choose_config(configs, spec.name, folder.label)
        subfolder = config.data_dir
        notices += _config_notices(folder, configs, config, spec)
    if config is not None and config.patterns:
        if validation:
            spec = for_validation(spec, map(split_kind, config.patterns))
        files, split_notices = _files_of_card(folder, config, spec)
        return files, [*notices, *split_notices]
    names = [name for name in folder.names() if not _is_hidden(name)]
    if config is None and spec.name not in (None, "default"):
        subfolder = _subfolder(folder, names, str(spec.name))
    root = "" if subfolder == "." else f"{subfolder.strip('/')}/"
    below = [name.removeprefix(root) for name in names if name.startswith(root)]
    data = _data_files(below)
    if not data:
        shown = ", ".join(_base(name) for name in below[:6]) or "nothing"
        fix = next(filter(None, (conversion_fix(Path(name)) for name in below)), "")
        where = "/".join([folder.label.rstrip("/"), *([root.rstrip("/")] if root else [])])
        raise ConfigError(
            "no data files in the folder `{where}` (it has {shown})",
            code="no-data-files",
            allowed=KINDS,
            fix=fix,
            where=where,
            shown=shown,
        )
    if validation:
        spec = for_validation(spec, map(split_of_file, data))
    chosen, split_notices = choose_files(data, spec, folder.label)
    skipped = [name for name in below if name not in data]
    if skipped:
        text = UserText(
            "{folder}: {num_chosen} data files; skipped {files}",
            code="folder-files-skipped",
            folder=folder.label,
            num_chosen=len(chosen),
            files=shorten(skipped),
        )
        split_notices.append(Notice("info", text))
    return [root + name for name in chosen], [*notices, *split_notices]


def tables_or_texts(files: Iterable[Path]) -> list[Path]:
    """Return the tables among the files, or else the files of plain text."""
    files = list(files)
    return [path for path in files if is_table(path)] or [path for path in files if is_text(path)]


def _data_files(names: Iterable[str]) -> list[str]:
    files = (
        Path(name)
        for name in names
        if _base(name).lower() not in _NOT_DATA and not _base(name).startswith("cache-")
    )
    return [path.as_posix() for path in tables_or_texts(files)]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__")) for part in name.split("/"))


def _config_notices(
    folder: DataFolder, configs: list[CardConfig], config: CardConfig, spec: DatasetSource
) -> list[Notice]:
    notices = []
    if spec.name is None and len(configs) > 1:
        others = ", ".join(each.name for each in configs if each is not config)
        text = UserText(
            "{folder}: configuration `{config}`, the default; not used: {others}",
            code="default-configuration",
            folder=folder.label,
            config=config.name,
            others=others,
        )
        notices.append(Notice("info", text))
    if config.unused:
        text = UserText(
            "{folder}: settings of the dataset card that are not used: {settings}",
            code="card-settings-not-used",
            folder=folder.label,
            settings=", ".join(config.unused),
        )
        notices.append(Notice("warning", text))
    return notices


def _subfolder(folder: DataFolder, names: list[str], subfolder: str) -> str:
    """Return the subfolder with the files of a configuration that no card declares."""
    below = [name for name in names if "/" in name and _data_files([name])]
    known = sorted({name.partition("/")[0] for name in below})
    known = [name for name in known if split_kind(name) is None]
    if subfolder not in known:
        raise unknown_name(folder.label, subfolder, known)
    return subfolder


def _files_of_card(
    folder: DataFolder, config: CardConfig, spec: DatasetSource
) -> tuple[list[str], list[Notice]]:
    """Return the files of the split of a configuration whose card names them."""
    splits, wanted = list(config.patterns), spec.split
    name = wanted
    if wanted not in splits:
        kind = split_kind(wanted)
        of_kind = [each for each in splits if kind is not None and split_kind(each) == kind]
        is_only = "split" not in spec.model_fields_set and len(splits) == 1
        of_kind = of_kind or (splits if is_only else [])
        if len(of_kind) != 1:
            raise ConfigError(
                "the configuration `{config}` of `{folder}` has no split `{wanted}`",
                code="unknown-split",
                allowed=", ".join(splits),
                fix="select one: `dataset: {path: {folder}, split: {splits}}`",
                config=config.name,
                folder=folder.label,
                wanted=wanted,
                splits=splits[0],
            )
        name = of_kind[0]
    matches = [path for pattern in config.patterns_of(name) for path in folder.matches(pattern)]
    files = [path.as_posix() for path in dict.fromkeys(tables_or_texts(map(Path, matches)))]
    if not files:
        patterns = ", ".join(config.patterns[name])
        raise ConfigError(
            "the folder `{folder}` has no data files of the split `{name}` of the configuration"
            " `{config}` (patterns of its card: {patterns})",
            code="no-files-of-split",
            allowed=KINDS,
            fix="download the files, or select another configuration with `name`",
            folder=folder.label,
            name=name,
            config=config.name,
            patterns=patterns,
        )
    others = [each for each in splits if each != name]
    unused = f"; not used: {', '.join(others)}" if others else ""
    level = "info" if name == wanted else "warning"
    if others or level == "warning":
        return files, [
            Notice(
                level,
                UserText(
                    "{folder}: using split `{name}`{unused}",
                    code="split-chosen",
                    folder=folder.label,
                    name=name,
                    unused=unused,
                ),
            )
        ]
    return files, []

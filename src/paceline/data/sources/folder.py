"""Find the data files of a folder: those of a configuration and of a split."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.data.sources.card import CardConfig, choose_config, read_card, unknown_name
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


def find_files(
    folder: Path, spec: DatasetSource, validation: bool = False
) -> tuple[list[Path], list[Notice]]:
    """Return the data files of a folder, sorted, and messages about the others: tables if there are
    any, else plain text.

    The dataset card of the folder declares the files of its configurations and splits, as on the
    hub. Without a declaration, `name` is a subfolder, and the names of the files show the splits.

    Args:
        validation: whether the data are for validation: a held-out split is then the default.

    Raises:
        ConfigError: there are no data files, or no such configuration or split.
    """
    configs, notices = read_card(folder)
    root, config = folder, None
    if configs:
        config = choose_config(configs, spec.name, folder)
        root = folder / config.data_dir
        notices += _config_notices(folder, configs, config, spec)
    elif spec.name not in (None, "default"):
        root = _subfolder(folder, str(spec.name))
    if config is not None and config.patterns:
        if validation:
            spec = for_validation(spec, map(split_kind, config.patterns))
        files, split_notices = _files_of_card(folder, config, spec)
        return files, [*notices, *split_notices]
    files = _list_files(root)
    data = _data_files(files)
    if not data:
        names = ", ".join(path.name for path in files[:6]) or "nothing"
        fix = next(filter(None, (conversion_fix(path) for path in files)), "")
        raise ConfigError(
            f"no data files in the folder `{root}` (it has {names})", allowed=KINDS, fix=fix
        )
    by_name = {path.relative_to(root).as_posix(): path for path in data}
    if validation:
        spec = for_validation(spec, map(split_of_file, by_name))
    chosen, split_notices = choose_files(list(by_name), spec, str(folder))
    skipped = [path.name for path in files if path not in data]
    if skipped:
        text = f"{folder}: {len(chosen)} data files; skipped {shorten(skipped)}"
        split_notices.append(Notice("info", text))
    return [by_name[name] for name in chosen], [*notices, *split_notices]


def tables_or_texts(files: Iterable[Path]) -> list[Path]:
    """Return the tables among the files, or else the files of plain text."""
    files = list(files)
    return [path for path in files if is_table(path)] or [path for path in files if is_text(path)]


def _list_files(folder: Path) -> list[Path]:
    """Return the files below a folder, without hidden ones, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
    )


def _data_files(files: Iterable[Path]) -> list[Path]:
    return tables_or_texts(
        path
        for path in files
        if path.name.lower() not in _NOT_DATA and not path.name.startswith("cache-")
    )


def _config_notices(
    folder: Path, configs: list[CardConfig], config: CardConfig, spec: DatasetSource
) -> list[Notice]:
    notices = []
    if spec.name is None and len(configs) > 1:
        others = ", ".join(each.name for each in configs if each is not config)
        text = f"{folder}: configuration `{config.name}`, the default; not used: {others}"
        notices.append(Notice("info", text))
    if config.unused:
        text = f"{folder}: settings of the dataset card that are not used:"
        notices.append(Notice("warning", f"{text} {', '.join(config.unused)}"))
    return notices


def _subfolder(folder: Path, name: str) -> Path:
    """Return the subfolder with the files of a configuration that no card declares."""
    known = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and split_kind(path.name) is None and _data_files(_list_files(path))
    )
    if name not in known:
        raise unknown_name(folder, name, known)
    return folder / name


def _files_of_card(
    folder: Path, config: CardConfig, spec: DatasetSource
) -> tuple[list[Path], list[Notice]]:
    """Return the files of the split of a configuration whose card names them."""
    splits, wanted = config.splits(folder), spec.split
    name = wanted
    if wanted not in splits:
        kind = split_kind(wanted)
        of_kind = [each for each in splits if kind is not None and split_kind(each) == kind]
        is_only = "split" not in spec.model_fields_set and len(splits) == 1
        of_kind = of_kind or (list(splits) if is_only else [])
        if len(of_kind) != 1:
            raise ConfigError(
                f"the configuration `{config.name}` of `{folder}` has no split `{wanted}`",
                allowed=", ".join(splits),
                fix=f"select one: `dataset: {{path: {folder}, split: {next(iter(splits))}}}`",
            )
        name = of_kind[0]
    files = list(dict.fromkeys(tables_or_texts(splits[name])))
    if not files:
        patterns = ", ".join(config.patterns[name])
        raise ConfigError(
            f"the folder `{folder}` has no data files of the split `{name}` of the configuration"
            f" `{config.name}` (patterns of its card: {patterns})",
            allowed=KINDS,
            fix="download the files, or select another configuration with `name`",
        )
    others = [each for each in splits if each != name]
    unused = f"; not used: {', '.join(others)}" if others else ""
    level = "info" if name == wanted else "warning"
    if others or level == "warning":
        return files, [Notice(level, f"{folder}: using split `{name}`{unused}")]
    return files, []

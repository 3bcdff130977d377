"""The splits that the names of files and folders show, as in the library `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText

#: The names that splits have in files and file names.
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev", "eval", "evaluation"},
    "test": {"test", "testing"},
}
#: Words that `datasets` reads as names of a test split.
_ALSO_TEST = {"eval", "evaluation"}
#: A file that is one of several, such as ``train_sft-00000-of-00003.parquet``.
_NUMBERED = re.compile(r"(.+?)[-_.]\d{5}-of-\d{5}")
_NUMBERED_ON_HUB = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}")


def split_kind(name: str) -> str | None:
    """Return the usual name of a split: ``train``, ``validation`` or ``test``; None for others."""
    parts = _parts(name)
    return next((kind for kind, names in SPLITS.items() if names & parts), None)


def split_of_file(name: str) -> str | None:
    """Return the kind of split that the path of a file below the folder of a dataset shows, or
    None. The names of folders come before the name of the file."""
    path = PurePosixPath(name)
    return next(filter(None, map(split_kind, [*path.parts[:-1], path.name])), None)


def choose_files(
    names: Sequence[str], spec: DatasetSource, label: str
) -> tuple[list[str], list[Notice]]:
    """Return the files of the split that ``spec`` selects, and messages about the others.

    Files whose name shows no split are training data. If the names of all files show held-out
    splits and the config names no split, all files are used.

    Args:
        names: paths of the data files below the folder of the dataset, with ``/``.
        label: name of the dataset, for messages.

    Raises:
        ConfigError: no file belongs to the split.
    """
    wanted, kinds = spec.split, {name: split_of_file(name) for name in names}
    chosen = _files_of_split(kinds, wanted)
    others = [name for name in names if name not in chosen]
    if not chosen:
        if not any(kinds.values()) and any(name.lower().endswith(".json") for name in names):
            return list(names), []  # an object in the file may have the split
        if "split" in spec.model_fields_set:
            raise _unknown_split(label, wanted, names)
        text = UserText(
            "{label}: the names of all data files show held-out splits, and they are trained"
            " on: {files}",
            code="held-out-files-trained",
            label=label,
            files=shorten(names),
        )
        return list(names), [Notice("warning", text)]
    if len(numbered := _numbered_splits(chosen)) > 1 and wanted not in numbered:
        raise _unknown_split(label, wanted, names)
    if not others:
        return chosen, []
    if any(kinds[name] for name in chosen):
        text = UserText(
            "{label}: split {wanted}; skipped files of other splits: {files}",
            code="other-splits-skipped",
            label=label,
            wanted=wanted,
            files=shorten(others),
        )
        return chosen, [Notice("info", text)]
    text = UserText(
        "{label}: {num_others:file} held out by name and not trained on: {files}. To train"
        " on them, list the files in `dataset`; to evaluate on them, in `val_dataset`",
        code="files-held-out",
        label=label,
        num_others=len(others),
        files=shorten(others),
    )
    return chosen, [Notice("warning", text)]


def for_validation(spec: DatasetSource, kinds: Iterable[str | None]) -> DatasetSource:
    """Return the source with a held-out split, ``validation`` or else ``test``, if the dataset has
    one and the config names none.

    Args:
        kinds: the kinds of splits that the dataset has.
    """
    known = set(kinds)
    split = next((kind for kind in ("validation", "test") if kind in known), None)
    if split is None or "split" in spec.model_fields_set:
        return spec
    return spec.model_copy(update={"split": split})


def _files_of_split(kinds: dict[str, str | None], wanted: str) -> list[str]:
    """Return the files that have exactly the name of the split, or else the files of its kind."""
    exact = [name for name in kinds if wanted in _exact_names(name)]
    kind = split_kind(wanted)
    if kind is None or wanted not in SPLITS[kind]:
        return exact
    if kind == "train":
        return [name for name in kinds if kinds[name] in ("train", None)]
    chosen = [name for name in kinds if kinds[name] == kind]
    if not chosen and kind == "test":
        chosen = [name for name in kinds if _parts(name) & _ALSO_TEST]
    return chosen


def _numbered_splits(names: Sequence[str]) -> set[str]:
    """Return the names of the splits if all files have the layout of the hub, such as
    ``data/train_sft-00000-of-00003.parquet``."""
    matches = [_NUMBERED_ON_HUB.match(name) for name in names]
    return {match[1] for match in matches if match} if all(matches) else set()


def _exact_names(name: str) -> set[str]:
    """Return the names that a split with this file can have: the names of its folders, and its
    own name without numbers and suffixes."""
    path = PurePosixPath(name)
    stem = path.name.partition(".")[0]
    numbered = _NUMBERED.match(path.name)
    return {*path.parts[:-1], stem, *([numbered[1]] if numbered else [])}


def _unknown_split(label: str, wanted: str, names: Sequence[str]) -> ConfigError:
    known = {split_of_file(name) or "train" for name in names}
    known |= {numbered[1] for name in names if (numbered := _NUMBERED.match(_base(name)))}
    return ConfigError(
        "`{label}` has no split `{wanted}` (files: {files})",
        code="unknown-split-of-dataset",
        allowed=", ".join(sorted(known)),
        fix="select one: `dataset: {path: {label}, split: {known}}`, or list the files",
        label=label,
        wanted=wanted,
        files=shorten(names),
        known=min(known),
    )


def check_split(spec: DatasetSource) -> None:
    """Check that the split of a source that is not on the hub is the name of one split.

    Raises:
        ConfigError: it is a part of a split or a sum of splits, as in `datasets`.
    """
    base, bracket, part = spec.split.partition("[")
    if not bracket and "+" not in spec.split:
        return
    path = spec.path.partition("#")[0]
    fix = "list the source once for each split"
    if bracket:
        share = re.fullmatch(r":(\d+%?)\]", part)
        fix = f"use `{path}#{share[1] if share else 'N'}`, which selects rows by a seeded shuffle"
        fix += f", with `split: {base}`"
    raise ConfigError(
        "`split: {split}` of `{path}` is supported only for datasets on the hub",
        code="split-of-local-file",
        allowed="the name of one split",
        fix=fix,
        split=spec.split,
        path=path,
    )


def shorten(names: Sequence[str]) -> str:
    """Return the names of the first files, and the number of the others."""
    shown = ", ".join(map(_base, names[:4]))
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _base(name: str) -> str:
    return PurePosixPath(name).name


def _parts(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))

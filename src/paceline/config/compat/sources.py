"""Resolve keys of other tools that change the data sources, which another key names."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.compat.conversion import UnsupportedValue
from paceline.config.compat.datasets import limit, with_fields, with_shares
from paceline.config.compat.llamafactory.dataset_info import FILE, in_folder
from paceline.config.compat.merge import Action, Merge
from paceline.config.compat.notices import read_as_remark
from paceline.config.entries import Notice, short
from paceline.config.fields import SOURCE_KEYS
from paceline.config.settings import RESET, Assignment
from paceline.config.yaml_read import YamlValue

_OTHER_DATA: Notice = (
    "info",
    "is ignored: it belongs to the dataset that an override has replaced",
)


def _has_validation_data(merge: Merge, by: Assignment) -> bool:
    """Return whether the config sets validation data, and the key of ``by`` does not override
    them."""
    keys = [key for key in ("val_dataset", "split_dataset_ratio") if merge.value_of(key)]
    return any(merge.yields_to(key, by) for key in keys)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _change_sources(
    merge: Merge,
    by: Assignment,
    change: Callable[[list[Any]], list[Any]],
    any_layer: bool = False,
    key: str = "dataset",
) -> bool:
    """Change the data sources; return False if an override has replaced those that the key belongs
    to."""
    data = merge.winners.get(key)
    if (
        data is None
        or data.value in (RESET, None)
        or (data.entry.layer > by.entry.layer and not any_layer)
    ):
        return False
    sources = change(as_list(data.value))
    value = sources if isinstance(data.value, list) else sources[0]
    merge.set_winner(key, value, data)
    return True


def _dataset_dir(merge: Merge, by: Assignment) -> Notice:
    before = merge.value_of("dataset")
    notes: list[str] = []

    def change(sources: list[Any]) -> list[Any]:
        return in_folder(sources, str(by.value), merge.value_of("task") or "sft", notes)

    def change_overridden(sources: list[Any]) -> list[Any]:
        # A path on the command line is not a name of the folder.
        return [
            source if isinstance(source, str) and _is_path(source) else change([source])[0]
            for source in sources
        ]

    for key in SOURCE_KEYS:
        is_overridden = merge.is_overridden(key, by)
        _change_sources(merge, by, change_overridden if is_overridden else change, True, key)
    after = merge.value_of("dataset")
    if by.value == "ONLINE":
        return "info", "the datasets are hub ids"
    if after == before:
        return "info", "has no files with these names; the datasets are read as paths or hub ids"
    text = "; ".join([f"gives `dataset: {short(after)}`", *dict.fromkeys(notes)])
    return "warning" if notes else "info", text


def _is_path(source: str) -> bool:
    return Path(source.partition("#")[0]).exists()


def use_default_folder(merge: Merge) -> None:
    """Use `data/` as LLaMA-Factory does if its config does not set `dataset_dir`."""
    data = merge.winners.get("dataset")
    table = Path("data") / FILE
    is_llama_factory = 0 < merge.scores["l"] == max(merge.scores.values())
    if "_dataset_dir" in merge.winners or not is_llama_factory:
        return
    if data is not None and table.is_file():
        notice = merge.attempt(_dataset_dir, Assignment("_dataset_dir", "data", data.entry))
        if notice:
            text = f"{table}, LLaMA-Factory's default, {notice[1]}"
            merge.general_notices.append((notice[0], text))


def _max_samples(merge: Merge, by: Assignment) -> Notice:
    number = by.value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise UnsupportedValue(
            f"{short(number)} is not a number of samples", "set a whole number of at least 1"
        )
    change = partial(limit, number=number)
    _change_sources(merge, by, change, any_layer=True)
    _change_sources(merge, by, change, key="val_dataset")
    return "info", f"is read as `path#{number}` for each source: {short(merge.value_of('dataset'))}"


def _set_field(merge: Merge, by: Assignment, name: str) -> Notice:
    fields: dict[str, YamlValue] = {name: by.value}
    if name == "text":
        if by.value == "text":
            return "info", "is the default"
        fields = {"columns": {"text": by.value}, "format": "text"}
    elif name == "prompt":
        fields = {"columns": {"prompt": by.value}}
    layer = merge.layer_of("dataset")
    replaces = layer is not None and layer < by.entry.layer
    if not _change_sources(merge, by, partial(with_fields, fields=fields, replaces=replaces)):
        return _OTHER_DATA
    return "info", f"is read as {short(fields)} of each source"


def _test_split(merge: Merge, by: Assignment) -> Notice:
    data = merge.winners.get("dataset")
    if data is None or data.entry.layer > by.entry.layer:
        return _OTHER_DATA
    if _has_validation_data(merge, by):
        return "info", "is overridden by the validation data of the config"
    sources = [{**source, "split": by.value} for source in with_fields(as_list(data.value), {})]
    merge.set_winner("val_dataset", sources, by)
    return "info", read_as_remark("val_dataset", sources)


def _listed_splits(merge: Merge, by: Assignment) -> Notice:
    """Apply alignment-handbook's `dataset_splits` to each source: splits with `train` in their name
    are for training, those with `test` for evaluation."""
    splits = [str(split) for split in as_list(by.value)]
    train = [split for split in splits if "train" in split]
    test = [split for split in splits if "test" in split]
    if not train or len(train) + len(test) < len(splits):
        raise UnsupportedValue(
            f"{short(splits)}: a split is for training if its name contains `train`, and for"
            " evaluation if it contains `test`",
            "set the split of each source: `dataset: [{path: ..., split: ...}]`",
        )
    data = merge.winners.get("dataset")

    def with_splits(sources: list[Any], names: list[str]) -> list[Any]:
        return [source for name in names for source in with_fields(sources, {"split": name})]

    if data is None or not _change_sources(merge, by, partial(with_splits, names=train)):
        return _OTHER_DATA
    text = f"is read as the split of each source: {short(merge.value_of('dataset'))}"
    if test and not _has_validation_data(merge, by):
        merge.set_winner("val_dataset", with_splits(as_list(data.value), test), by)
        text += f", and `val_dataset: {short(merge.value_of('val_dataset'))}`"
    return "info", text


def _check_count(merge: Merge, values: list[Any], noun: str, form: str) -> None:
    """Raise UnsupportedValue unless there is a value for each source."""
    count = len(as_list(merge.value_of("dataset")))
    if len(values) != count:
        raise UnsupportedValue(
            f"expected one {noun} for each of {count} sources, got {len(values)}",
            f"set one {form} for each source",
        )


def _listed_configs(merge: Merge, by: Assignment) -> Notice:
    """Apply alignment-handbook's `dataset_configs`: one name for each source, in order."""
    names = as_list(by.value)
    _check_count(merge, names, "name", "name")

    def change(sources: list[Any]) -> list[Any]:
        pairs = zip(with_fields(sources, {}), names, strict=True)
        return [{"name": name, **source} for source, name in pairs]

    if not _change_sources(merge, by, change):
        return _OTHER_DATA
    return "info", f"is read as the `name` of each source: {short(merge.value_of('dataset'))}"


def _interleave_probs(merge: Merge, by: Assignment) -> Notice:
    """Apply the probabilities of LLaMA-Factory and ms-swift as the weight of each source."""
    if by.entry.name == "interleave_probs" and merge.value_of("mixing") in (None, "concat"):
        return "info", "has no effect without `mix_strategy: interleave_...`"
    values = by.value.split(",") if isinstance(by.value, str) else as_list(by.value)
    try:
        weights = [float(value) for value in values]
    except (TypeError, ValueError):
        raise UnsupportedValue(
            f"{short(by.value)} are not probabilities", "set one number for each source"
        ) from None
    _check_count(merge, weights, "probability", "number")

    def change(sources: list[Any]) -> list[Any]:
        pairs = zip(with_fields(sources, {}), weights, strict=True)
        return [{**source, "weight": weight} for source, weight in pairs]

    if not _change_sources(merge, by, change):
        return _OTHER_DATA
    merge.set_winner("mixing", "weights", by)
    return "info", f"is read as the `weight` of each source, with `mixing: weights`: {weights}"


def _shares(merge: Merge, by: Assignment) -> Notice:
    """Apply the weights of axolotl's sources as shares of their rows, unless they are mixed."""
    if merge.value_of("mixing") == "weights":
        return "info", "has the weights of `mixing: weights`"
    if not _change_sources(merge, by, with_shares):
        return _OTHER_DATA
    shown = short(merge.value_of("dataset"))
    return "info", f"is read with `weight` as the share of the rows that is used: {shown}"


#: Pseudo-target → function that applies it, in this order, as some read what others set.
ACTIONS: dict[str, Action] = {
    "_dataset_dir": _dataset_dir,
    "_listed_configs": _listed_configs,
    "_listed_splits": _listed_splits,
    "_columns": partial(_set_field, name="columns"),
    "_name": partial(_set_field, name="name"),
    "_test_split": _test_split,
    "_split": partial(_set_field, name="split"),
    "_text_field": partial(_set_field, name="text"),
    "_prompt_field": partial(_set_field, name="prompt"),
    "_max_samples": _max_samples,
    "_interleave_probs": _interleave_probs,
    "_shares": _shares,
}

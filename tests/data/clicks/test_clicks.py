"""Click logs: the generative model, the exact AUC, and the conversion and errors of user files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raised import raises_error

from paceline.config.schema.tasks import Recommend
from paceline.core.errors import ConfigError
from paceline.data.clicks.log import (
    builtin_clicks,
    exact_auc,
    generate,
    load_log,
    load_meta,
)
from paceline.data.clicks.reader import read_clicks


@pytest.fixture(autouse=True)
def use_temporary_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_auc_is_fraction_of_correctly_ordered_pairs() -> None:
    generator = np.random.default_rng(0)
    for size, values in ((7, 3), (50, 1000), (200, 5)):
        labels, scores = (
            generator.integers(0, 2, size),
            generator.integers(0, values, size).astype(float),
        )
        pairs = scores[labels == 1][:, None] - scores[labels == 0][None, :]
        assert exact_auc(labels, scores) == pytest.approx(
            float((pairs > 0).mean() + 0.5 * (pairs == 0).mean()), abs=1e-12
        )
    assert np.isnan(exact_auc(np.ones(3), np.arange(3)))


def test_auc_matches_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    generator = np.random.default_rng(1)
    labels, scores = generator.integers(0, 2, 3000), np.round(generator.standard_normal(3000), 1)
    assert exact_auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_generated_clicks_follow_documented_distributions() -> None:
    log = generate(60_000)
    again = generate(60_000)
    assert all(np.array_equal(ids, other) for ids, other in zip(log.ids, again.ids, strict=True))
    assert np.array_equal(log.labels, again.labels)
    assert log.chance is not None
    # Clicks are drawn with the stated probabilities: in every decile, the fraction of clicks is
    # within five standard errors of the expected one.
    order = np.argsort(log.chance)
    for decile in np.array_split(order, 10):
        p = log.chance[decile].astype(np.float64)
        assert abs(float((log.labels[decile] - p).sum())) < 5 * float(np.sqrt((p * (1 - p)).sum()))
    # Ids follow a power law: the frequency of the r-th most common id is close to r^-1.2,
    # normalized.
    for ids, size in zip(log.ids, log.tables, strict=True):
        assert 0 <= ids.min() <= ids.max() < size
        law = np.arange(1, size + 1) ** -1.2
        counts = np.sort(np.bincount(ids, minlength=size))[::-1]
        assert counts[:5] / len(ids) == pytest.approx((law / law.sum())[:5], rel=0.05)


def test_builtin_clicks_are_cached_and_unknown_name_is_rejected() -> None:
    folder = builtin_clicks("builtin:clicks")
    log = load_log(folder)
    assert (len(log), len(log.names)) == (load_meta(folder)["read"], 6)
    modified_ns = (folder / "labels.npy").stat().st_mtime_ns
    assert builtin_clicks("builtin:clicks") == folder
    assert (folder / "labels.npy").stat().st_mtime_ns == modified_ns
    with pytest.raises(ConfigError, match="did you mean `builtin:clicks`"):
        builtin_clicks("builtin:click")


LINES = [
    "click,age,user,tags",
    "1,30,ann,a|b|a",
    "0,,bob,",
    "2,1,ann,a",
    "1,old,ann,b",
    "0,50,cid,c|b",
    "1,20,,b",
]


def settings(**keys: Any) -> Recommend:
    values = {
        "label": "click",
        "dense_features": ["age"],
        "sparse_features": ["user", "tags"],
        "separator": "|",
        **keys,
    }
    return Recommend.model_validate(values)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_file_is_converted_to_id_bags_and_numbers(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "log.csv", LINES)
    if kind != "csv":
        import pandas as pd

        table, file = pd.read_csv(file, dtype=str, keep_default_na=False), tmp_path / f"log.{kind}"
        (
            table.to_parquet(file)
            if kind == "parquet"
            else table.to_json(file, orient="records", lines=True)
        )
    folder = read_clicks(str(file), settings(id_mapping="vocabulary"))
    log, meta = load_log(folder), load_meta(folder)
    assert (meta["read"], len(log)) == (6, 4)
    assert meta["dropped"] == {"click is not 0 or 1": 1, "age is not a number": 1}
    # Table rows are ordered by count, and ties by first occurrence: tags b 3, a 2, c 1; users ann,
    # bob, cid once each. An empty cell is an empty bag.
    assert meta["vocabulary"] == [{"ann": 1, "bob": 2, "cid": 3}, {"b": 1, "a": 2, "c": 3}]
    assert log.tables == (4, 4)
    batch = log.batch(np.array([3, 0, 1]))
    assert batch.label.tolist() == [1, 1, 0]
    assert batch.dense.ravel().tolist() == [20, 30, 0]
    assert [ids.tolist() for ids in batch.ids] == [[1, 2], [1, 2, 1, 2]]
    assert [starts.tolist() for starts in batch.starts] == [[0, 0, 1, 2], [0, 1, 4, 4]]


def test_validation_data_use_training_vocabulary(tmp_path: Path) -> None:
    train = read_clicks(
        str(write(tmp_path / "train.csv", LINES)), settings(id_mapping="vocabulary", min_count=2)
    )
    assert load_meta(train)["vocabulary"] == [{}, {"b": 1, "a": 2}]
    validation_file = write(tmp_path / "val.csv", ["click,age,user,tags", "1,3,dan,a|z|b"])
    log = load_log(
        read_clicks(str(validation_file), settings(id_mapping="vocabulary", min_count=2), train)
    )
    assert log.tables == load_log(train).tables == (1, 3)
    assert [ids.tolist() for ids in log.ids] == [[0], [2, 0, 1]]


def test_hashing_does_not_depend_on_file(tmp_path: Path) -> None:
    recommend = settings(table_size={"user": 7, "tags": 1000})
    first = load_log(read_clicks(str(write(tmp_path / "first.csv", LINES)), recommend))
    second = load_log(
        read_clicks(
            str(write(tmp_path / "second.csv", [LINES[0], *reversed(LINES[1:])])), recommend
        )
    )
    assert first.tables == (7, 1000)
    batch, other_batch = first.batch(np.array([0])), second.batch(np.array([3]))
    assert all(np.array_equal(a, b) for a, b in zip(batch.ids, other_batch.ids, strict=True))


@pytest.mark.parametrize(
    ("lines", "keys", "texts"),
    [
        (
            ["click,item", "1,4", "0,5"],
            {"id_mapping": "identity", "table_size": 5},
            ["row 3", "`item`", "id 5", "5 rows"],
        ),
        (["click,item", "1,-1"], {"id_mapping": "identity"}, ["`item`", "id -1"]),
        (
            ["click,item", "1,a", "0,b"],
            {"id_mapping": "vocabulary", "table_size": 2},
            ["`item`", "2 values", "2 rows", "at least 3"],
        ),
        (["klick,item", "1,a"], {}, ["no column `click`", "did you mean `klick`"]),
        (["click,item", "yes,a"], {}, ["no usable row", "click is not 0 or 1: 1"]),
    ],
)
def test_rejects_invalid_click_logs(
    tmp_path: Path, lines: list[str], keys: dict[str, Any], texts: list[str]
) -> None:
    file = write(tmp_path / "log.csv", lines)
    with pytest.raises(ConfigError) as caught:
        read_clicks(
            str(file),
            Recommend.model_validate({"label": "click", "sparse_features": ["item"], **keys}),
        )
    for text in texts:
        assert text in str(caught.value)
    assert not any((tmp_path / "cache").rglob("meta.json"))  # no incomplete cache entry remains


def test_rejects_ids_beyond_training_tables(tmp_path: Path) -> None:
    recommend = Recommend.model_validate(
        {"label": "click", "sparse_features": ["item"], "id_mapping": "identity"}
    )
    train = read_clicks(str(write(tmp_path / "train.csv", ["click,item", "1,3", "0,0"])), recommend)
    assert json.loads((train / "meta.json").read_text())["tables"] == [4]
    with raises_error(ConfigError, code="id-out-of-range", naming="item"):
        read_clicks(str(write(tmp_path / "val.csv", ["click,item", "1,4"])), recommend, train)

"""Dataset statistics compared with the result of tokenizing the dataset for training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import cached_lengths, prepare_tokens
from paceline.data.kinds.pair import PairKind
from paceline.data.stats.dataset import DatasetStats, dataset_stats, histogram
from paceline.data.stats.other import click_stats, image_stats
from paceline.data.stats.text import (
    click_facts,
    fact_table,
    image_facts,
    render_facts,
    render_page,
    table,
)
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

MODEL = "builtin:qwen2-micro"
CHATS = [
    {"messages": [
        {"role": "user", "content": "Why? " * (1 + 7 * (number % 9))},
        {"role": "assistant", "content": f"Because of {number % 20}. " * (1 + number % 13)},
    ]} for number in range(60)
]  # fmt: skip


def config(dataset: Path, task: str = "sft", **train_args: Any) -> Config:
    return Config(model=MODEL, dataset=str(dataset), task=task, train_args=train_args)


@pytest.fixture
def chats_file(tmp_path: Path) -> Path:
    rows = [*CHATS, CHATS[3], CHATS[4], CHATS[3]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("truncation_strategy", ["truncate", "drop"])
def test_length_limits_match_tokenized_training_data(
    chats_file: Path, truncation_strategy: str
) -> None:
    # A limit of 40 truncates most samples, but the statistics are those of the full samples.
    stats, _ = dataset_stats(
        config(chats_file, max_length=40, truncation_strategy=truncation_strategy), resolve_model
    )
    assert stats["samples"] == 63
    assert stats["max_length"] == 40
    limits = {limit["max_length"]: limit for limit in stats["limits"]}
    assert sorted(limits) == [40, 128, 256, 512, 1024, 2048, 4096, 8192]
    for limit in (40, 128):
        prepared = prepare_tokens(
            config(chats_file, max_length=limit, truncation_strategy=truncation_strategy),
            "sft",
            resolve_model,
        )
        assert (
            0
            < limits[limit]["samples_cut"]
            == prepared.counts.truncated + sum(prepared.counts.dropped.values())
        )
        assert limits[limit]["samples_left_out"] == sum(prepared.counts.dropped.values())
        assert stats["tokens"] - limits[limit]["tokens_lost"] == prepared.train_tokens
    assert limits[8192]["samples_cut"] == limits[8192]["tokens_lost"] == 0


def test_splitting_documents_loses_only_single_leftover_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "word " * number} for number in range(1, 300, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stats, _ = dataset_stats(config(path, task="pretrain", max_length=16), resolve_model)
    prepared = prepare_tokens(
        config(path, task="pretrain", max_length=16), "pretrain", resolve_model
    )
    limit = stats["limits"][0]
    assert limit["max_length"] == 16
    assert stats["tokens"] - limit["tokens_lost"] == prepared.train_tokens
    assert 0 < limit["tokens_lost"] < len(rows)
    assert limit["samples_left_out"] == 0


def test_duplicates_vocabulary_and_lengths_match_samples(chats_file: Path) -> None:
    settings = config(chats_file, max_length=4096)
    stats, prepared = dataset_stats(settings, resolve_model)
    samples = [
        tuple(sample["input_ids"].tolist())
        for sample in map(TokenDataset(prepared.train_folder).__getitem__, range(63))
    ]
    distinct = len(set(samples))
    assert stats["duplicates"]["distinct"] == distinct
    assert stats["duplicates"]["samples"] == 63 - distinct
    repeated = stats["duplicates"]["most_repeated"][0]
    assert (repeated["sample"], repeated["times"]) == (3, samples.count(samples[3]))
    assert "Why?" in repeated["text"]
    assert stats["vocabulary"]["used"] == len({token for sample in samples for token in sample})
    assert stats["vocabulary"]["size"] == load_tokenizer(Path(prepared.tokenizer_path)).vocab_size
    # The planner reads the same lengths.
    cached = cached_lengths(settings, "sft", resolve_model)
    assert cached is not None
    assert sorted(cached[0].tolist()) == sorted(map(len, samples))
    assert stats["label_tokens"] == int(cached[1].sum())
    assert stats["lengths"]["max"] == max(map(len, samples))
    assert stats["lengths"]["p50"] == sorted(map(len, samples))[31]


def test_histogram_counts_every_sample_once() -> None:
    generator = np.random.default_rng(0)
    for lengths in (
        np.array([5]),
        np.array([7] * 9),
        generator.integers(1, 100, 500),
        generator.lognormal(5, 1.5, 2000).astype(int) + 1,
    ):
        bins = histogram(lengths)
        assert len(bins) <= 42
        for bin_ in bins:
            inside = (lengths >= bin_["from"]) & (lengths < bin_["to"])
            assert bin_["samples"] == int(inside.sum())
        assert sum(bin_["samples"] for bin_ in bins) == len(lengths)


def test_page_and_table_show_statistics(chats_file: Path) -> None:
    stats, _ = dataset_stats(config(chats_file, max_length=64), resolve_model)
    result: DatasetStats = {**stats, "dataset": "</title><b>"}
    page = render_page(result)
    assert "<b>" not in page
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "<script" not in page
    for limit in result["limits"]:
        assert f"{limit['tokens_lost']:,}" in page
        assert f"{limit['tokens_lost']:,}" in table(result)


def test_rejects_task_without_tokens() -> None:
    with raises_error(ConfigError, code="statistics-with-task", naming="task"):
        dataset_stats(
            Config(model=MODEL, dataset="rows.csv", task="./my_task.py:Task"), resolve_model
        )


PAIRS = [
    {
        "prompt": "Why? " * (1 + number % 5),
        "chosen": f"Because of {number}. " * (1 + number % 7),
        "rejected": "No. " * (1 + 3 * (number % 11)),
    }
    for number in range(50)
]


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("task", "kind"), [("dpo", "pairs"), ("orpo", "pairs"),
                                            ("simpo", "pairs"), ("reward", "reward")])  # fmt: skip
@pytest.mark.parametrize("truncation_strategy", ["truncate", "drop"])
def test_pairs_are_cut_as_in_training(
    tmp_path: Path, task: str, kind: Any, truncation_strategy: str
) -> None:
    path = save(tmp_path / "pairs.jsonl", PAIRS)
    settings = config(path, task, max_length=64, truncation_strategy=truncation_strategy)
    stats, _ = dataset_stats(settings, resolve_model)
    assert (stats["samples"], stats["sequences"], stats["classes"]) == (50, 100, None)
    limits = {limit["max_length"]: limit for limit in stats["limits"]}
    prepared = prepare_tokens(settings, kind, resolve_model)
    dropped = sum(prepared.counts.dropped.values())
    assert 0 < limits[64]["samples_cut"] == prepared.counts.truncated + dropped
    assert limits[64]["samples_left_out"] == dropped
    assert stats["tokens"] - limits[64]["tokens_lost"] == prepared.train_tokens
    uncut = prepare_tokens(config(path, task, max_length=4096), kind, resolve_model)
    full, _ = uncut.open(PairKind.columns)
    chosen_lengths = full.numbers("chosen_length")
    lengths = [*chosen_lengths, *(full.lengths - chosen_lengths)]
    assert stats["lengths"]["max"] == max(lengths)
    assert stats["lengths"]["p50"] == sorted(lengths)[49]
    assert sum(bin_["samples"] for bin_ in stats["histogram"]) == 100
    assert "50 pairs with 100 sequences" in table(stats)
    assert ("with loss" in table(stats)) == (task != "reward")
    assert render_page(stats).count("<svg") == 2


def test_answers_of_kto_are_counted_by_their_marks(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Why?", "completion": f"So {number}.", "label": number % 5 > 0}
        for number in range(20)
    ]
    stats, _ = dataset_stats(config(save(tmp_path / "a.jsonl", rows), "kto"), resolve_model)
    assert stats["classes"] == [
        {"label": "desirable", "samples": 16, "share": 0.8},
        {"label": "undesirable", "samples": 4, "share": 0.2},
    ]
    assert (stats["samples"], stats["sequences"]) == (20, 20)
    assert "desirable 16 (80.0 %), undesirable 4 (20.0 %)" in table(stats)


@pytest.mark.parametrize("truncation_strategy", ["truncate", "drop"])
def test_labeled_texts_are_counted_by_class(tmp_path: Path, truncation_strategy: str) -> None:
    rows = [{"text": "word " * (number + 1), "label": "abb"[number % 3]} for number in range(30)]
    path = save(tmp_path / "a.jsonl", rows)
    settings = config(path, "classify", max_length=20, truncation_strategy=truncation_strategy)
    stats, _ = dataset_stats(settings, resolve_model)
    assert stats["classes"] is not None
    assert [(each["label"], each["samples"]) for each in stats["classes"]] == [("b", 20), ("a", 10)]
    prepared = prepare_tokens(settings, "classify", resolve_model)
    limit = stats["limits"][0]
    assert limit["samples_left_out"] == sum(prepared.counts.dropped.values())
    assert stats["tokens"] - limit["tokens_lost"] == prepared.train_tokens
    assert "with loss" not in table(stats)


def test_images_are_counted_by_class(tmp_path: Path) -> None:
    for name, sizes in (("cat", (8, 16, 24)), ("dog", (8,))):
        (tmp_path / name).mkdir()
        for size in sizes:
            image = Image.new("RGB" if name == "cat" else "L", (size, 10), size)
            image.save(tmp_path / name / f"{size}.png")
    (tmp_path / "cat" / "copy.png").write_bytes((tmp_path / "cat" / "8.png").read_bytes())
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    stats, _ = image_stats(config(tmp_path, "classify"))
    assert [(each["label"], each["samples"]) for each in stats["classes"]] == [
        ("cat", 4),
        ("dog", 1),
    ]
    assert stats["width"] == {"min": 8, "mean": 12.8, "max": 24}
    assert stats["height"] == {"min": 10, "mean": 10, "max": 10}
    assert stats["modes"] == {"RGB": 4, "L": 1}
    assert stats["duplicates"] == 1
    assert stats["rows"]["dropped"] == {"not an image": 1}
    facts = image_facts(stats)
    assert "cat 4 (80.0 %), dog 1 (20.0 %)" in fact_table(facts)
    page = render_facts(stats, facts)
    assert "dog 1" in page
    assert "<svg" not in page


def test_click_log_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("clicked,price,shop\n1,2.0,a\n0,4.0,b\n0,6.0,a\n2,1,c\n1,2,3,4\n")
    recommend = {"label": "clicked", "dense_features": ["price"], "sparse_features": ["shop"]}
    settings = Config(
        model="builtin:dlrm", dataset=str(path), task="recommend", recommend=recommend
    )
    stats, _ = click_stats(settings)
    assert stats["samples"] == 3
    assert stats["clicks"] == pytest.approx(1 / 3)
    assert stats["dense"] == {"price": {"min": 2, "mean": 4, "max": 6}}
    assert stats["rows"]["read"] == 5
    assert sum(stats["rows"]["dropped"].values()) == 2
    assert any("more fields than the header" in reason for reason in stats["rows"]["dropped"])
    assert "33.33 %" in fact_table(click_facts(stats))

"""Dataset statistics compared with the result of tokenizing the dataset for training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.stats.dataset import DatasetStats, dataset_stats, histogram
from paceline.data.stats.text import render_page, table
from paceline.data.text.prepare import cached_lengths, prepare_tokens
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
    with pytest.raises(ConfigError, match="`task: sft` and `task: pretrain`"):
        dataset_stats(
            Config(model="builtin:digits-cnn", dataset="builtin:digits", task="classify"),
            resolve_model,
        )

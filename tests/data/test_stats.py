"""The figures of a dataset against what training's own preparation does with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.stats import DatasetStats, dataset_stats, histogram, render_page, table
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
def chats(tmp_path: Path) -> Path:
    rows = [*CHATS, CHATS[3], CHATS[4], CHATS[3]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_each_limit_is_what_training_then_does(chats: Path, overlong: str) -> None:
    # 40 cuts most of the samples: the figures come from the uncut ones all the same.
    figures, _ = dataset_stats(
        config(chats, max_length=40, truncation_strategy=overlong), resolve_model
    )
    assert figures["samples"] == 63
    assert figures["max_length"] == 40
    limits = {limit["max_length"]: limit for limit in figures["limits"]}
    assert sorted(limits) == [40, 128, 256, 512, 1024, 2048, 4096, 8192]
    for limit in (40, 128):
        prepared = prepare_tokens(
            config(chats, max_length=limit, truncation_strategy=overlong), "sft", resolve_model
        )
        assert (
            0
            < limits[limit]["samples_cut"]
            == prepared.counts.truncated + sum(prepared.counts.dropped.values())
        )
        assert limits[limit]["samples_left_out"] == sum(prepared.counts.dropped.values())
        assert figures["tokens"] - limits[limit]["tokens_lost"] == prepared.train_tokens
    assert limits[8192]["samples_cut"] == limits[8192]["tokens_lost"] == 0


def test_documents_are_cut_and_lose_lone_tokens_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "word " * number} for number in range(1, 300, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    figures, _ = dataset_stats(config(path, task="pretrain", max_length=16), resolve_model)
    prepared = prepare_tokens(
        config(path, task="pretrain", max_length=16), "pretrain", resolve_model
    )
    stats = figures["limits"][0]
    assert stats["max_length"] == 16
    assert figures["tokens"] - stats["tokens_lost"] == prepared.train_tokens
    assert 0 < stats["tokens_lost"] < len(rows)
    assert stats["samples_left_out"] == 0


def test_duplicates_vocabulary_and_lengths(chats: Path) -> None:
    settings = config(chats, max_length=4096)
    figures, prepared = dataset_stats(settings, resolve_model)
    samples = [
        tuple(sample["input_ids"].tolist())
        for sample in map(TokenDataset(prepared.train_folder).__getitem__, range(63))
    ]
    distinct = len(set(samples))
    assert figures["duplicates"]["distinct"] == distinct
    assert figures["duplicates"]["samples"] == 63 - distinct
    repeat = figures["duplicates"]["most_repeated"][0]
    assert (repeat["sample"], repeat["times"]) == (3, samples.count(samples[3]))
    assert "Why?" in repeat["text"]
    assert figures["vocabulary"]["used"] == len({token for sample in samples for token in sample})
    assert figures["vocabulary"]["size"] == load_tokenizer(Path(prepared.tokenizer_path)).vocab_size
    # What the planner reads are the same lengths.
    planned = cached_lengths(settings, "sft", resolve_model)
    assert planned is not None
    assert sorted(planned[0].tolist()) == sorted(map(len, samples))
    assert figures["label_tokens"] == int(planned[1].sum())
    assert figures["lengths"]["max"] == max(map(len, samples))
    assert figures["lengths"]["p50"] == sorted(map(len, samples))[31]


def test_the_histogram_holds_every_sample_once() -> None:
    chance = np.random.default_rng(0)
    for lengths in (
        np.array([5]),
        np.array([7] * 9),
        chance.integers(1, 100, 500),
        chance.lognormal(5, 1.5, 2000).astype(int) + 1,
    ):
        bins = histogram(lengths)
        assert len(bins) <= 42
        for bin_ in bins:
            inside = (lengths >= bin_["from"]) & (lengths < bin_["to"])
            assert bin_["samples"] == int(inside.sum())
        assert sum(bin_["samples"] for bin_ in bins) == len(lengths)


def test_the_page_and_the_table_hold_the_figures(chats: Path) -> None:
    figures, _ = dataset_stats(config(chats, max_length=64), resolve_model)
    result: DatasetStats = {**figures, "dataset": "</title><b>"}
    page = render_page(result)
    assert "<b>" not in page
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "<script" not in page
    for limit in result["limits"]:
        assert f"{limit['tokens_lost']:,}" in page
        assert f"{limit['tokens_lost']:,}" in table(result)


def test_a_task_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="sft, pretrain"):
        dataset_stats(
            Config(model="builtin:digits-cnn", dataset="builtin:digits", task="classify"),
            resolve_model,
        )

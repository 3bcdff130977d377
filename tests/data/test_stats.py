"""The figures of a dataset against what training's own preparation does with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.stats import DatasetStats, dataset_stats, histogram
from paceline.data.stats_view import render_page, table
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
    told = {one["max_length"]: one for one in figures["limits"]}
    assert sorted(told) == [40, 128, 256, 512, 1024, 2048, 4096, 8192]
    for limit in (40, 128):
        prepared = prepare_tokens(
            config(chats, max_length=limit, truncation_strategy=overlong), "sft", resolve_model
        )
        assert (
            0
            < told[limit]["samples_cut"]
            == prepared.counts.truncated + sum(prepared.counts.dropped.values())
        )
        assert told[limit]["samples_left_out"] == sum(prepared.counts.dropped.values())
        assert figures["tokens"] - told[limit]["tokens_lost"] == prepared.train_tokens
    assert told[8192]["samples_cut"] == told[8192]["tokens_lost"] == 0


def test_documents_are_cut_and_lose_lone_tokens_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "word " * number} for number in range(1, 300, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    figures, _ = dataset_stats(config(path, task="pretrain", max_length=16), resolve_model)
    prepared = prepare_tokens(
        config(path, task="pretrain", max_length=16), "pretrain", resolve_model
    )
    told = figures["limits"][0]
    assert told["max_length"] == 16
    assert figures["tokens"] - told["tokens_lost"] == prepared.train_tokens
    assert 0 < told["tokens_lost"] < len(rows)
    assert told["samples_left_out"] == 0


def test_duplicates_vocabulary_and_lengths(chats: Path) -> None:
    given = config(chats, max_length=4096)
    figures, prepared = dataset_stats(given, resolve_model)
    samples = [
        tuple(one["input_ids"].tolist())
        for one in map(TokenDataset(prepared.train_folder).__getitem__, range(63))
    ]
    distinct = len(set(samples))
    assert figures["duplicates"]["distinct"] == distinct
    assert figures["duplicates"]["samples"] == 63 - distinct
    most = figures["duplicates"]["most_repeated"][0]
    assert (most["sample"], most["times"]) == (3, samples.count(samples[3]))
    assert "Why?" in most["text"]
    assert figures["vocabulary"]["used"] == len({token for one in samples for token in one})
    assert figures["vocabulary"]["size"] == load_tokenizer(Path(prepared.tokenizer_path)).vocab_size
    # What the planner reads are the same lengths.
    planned = cached_lengths(given, "sft", resolve_model)
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
        for one in bins:
            assert one["samples"] == int(((lengths >= one["from"]) & (lengths < one["to"])).sum())
        assert sum(one["samples"] for one in bins) == len(lengths)


def test_the_page_and_the_table_hold_the_figures(chats: Path) -> None:
    figures, _ = dataset_stats(config(chats, max_length=64), resolve_model)
    result: DatasetStats = {**figures, "dataset": "</title><b>"}
    page = render_page(result)
    assert "<b>" not in page
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "<script" not in page
    for one in result["limits"]:
        assert f"{one['tokens_lost']:,}" in page
        assert f"{one['tokens_lost']:,}" in table(result)


def test_a_task_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="sft, pretrain"):
        dataset_stats(
            Config(model="builtin:digits-cnn", dataset="builtin:digits", task="classify"),
            resolve_model,
        )

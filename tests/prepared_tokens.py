"""Small datasets and helpers to tokenize them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

MODEL = "builtin:qwen2-micro"
CHATS = [
    {"messages": [
        {"role": "user", "content": f"What is {n} + {n}?"},
        {"role": "assistant", "content": f"It is {2 * n}: süß."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": f"Nothing, after {n}."},
    ]} for n in range(12)
]  # fmt: skip
PAIRS = [{"prompt": f"Q{n}: ", "completion": f"answer number {n}"} for n in range(12)]


def save(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prepare(
    dataset: Any, task: Any = "sft", train_args: dict[str, Any] | None = None, **settings: Any
) -> PreparedTokens:
    return prepare_tokens(
        Config(**{"model": MODEL, "dataset": dataset, "train_args": train_args or {}, **settings}),
        task,
        resolve_model,
    )


def train_set(tokens: PreparedTokens) -> TokenDataset:
    return TokenDataset(tokens.train_folder, tokens.train_indices)


def loss_segments(tokens: PreparedTokens, index: int = 0) -> list[tuple[bool, str]]:
    """Return the sample as a list of (carries loss, text) for consecutive tokens."""
    tokenizer = load_tokenizer(Path(tokens.tokenizer_path))
    sample = train_set(tokens)[index]
    edges = [0, *(np.flatnonzero(np.diff(sample["labels_mask"])) + 1), len(sample["input_ids"])]
    return [
        (
            bool(sample["labels_mask"][start]),
            tokenizer.decode(sample["input_ids"][start:end].tolist()),
        )
        for start, end in pairwise(edges)
    ]


def notice_text(tokens: PreparedTokens) -> str:
    return "\n".join(text for _, text in tokens.notices)


def expect_error(*args: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(*args, **settings)
    return str(caught.value)

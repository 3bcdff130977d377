"""A kind of samples of one's own is tokenized, cached, streamed and collated."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prepared_tokens import save

from paceline.config.schema import Config
from paceline.data.collate import pad_tokens
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.kinds.base import Encoded, SampleKind
from paceline.data.streaming.prepare import prepare_stream
from paceline.data.text.messages import read_text
from paceline.data.text.token_columns import NumberColumn
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

NAMES = ("anchor", "positive", "negative")
KIND = f"{__file__}:TripletKind"  # the line that names the kind


class TripletKind(SampleKind):
    columns = (NumberColumn("anchor_length"), NumberColumn("positive_length"))
    expected_columns = NAMES
    formats = {"triplet": "anchor, positive, negative"}  # noqa: RUF012

    def convert(self, row: Any) -> list[str]:
        row = self.renamed(row)
        return [read_text(row, (name,), name) for name in NAMES]

    def encode(self, samples: list[list[str]]) -> list[Encoded | str]:
        texts = [text for sample in samples for text in sample]
        ids = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        triplets = [(next(ids), next(ids), next(ids)) for _ in samples]
        return [
            Encoded(
                np.array([*anchor, *positive, *negative], dtype=np.int32),
                np.ones(len(anchor) + len(positive) + len(negative), dtype=np.bool_),
                {"anchor_length": len(anchor), "positive_length": len(positive)},
            )
            for anchor, positive, negative in triplets
        ]


def collate(samples: Sequence[Any]) -> list[torch.Tensor]:
    """Return the anchors, the positives and the negatives: int64 [samples, longest] each."""
    parts: list[list[np.ndarray]] = [[], [], []]
    for sample in samples:
        anchor, positive = sample["anchor_length"], sample["positive_length"]
        bounds = pairwise((0, anchor, anchor + positive, len(sample["input_ids"])))
        for part, (start, stop) in zip(parts, bounds, strict=True):
            part.append(sample["input_ids"][start:stop])
    return [torch.from_numpy(pad_tokens(part, 0)) for part in parts]


def test_triplets_are_tokenized_cached_streamed_and_collated(tmp_path: Path) -> None:
    rows = [{"anchor": f"a{n}", "positive": f"is {n}", "other": "no " * n} for n in range(9)]
    path = save(tmp_path / "rows.jsonl", rows)
    columns = {"negative": "other"}
    data = {"model": "builtin:qwen2-micro", "dataset": {"path": path, "columns": columns}}
    config = Config.model_validate({**data, "streaming": True, "train_args": {"shuffle": False}})
    tokens = prepare_tokens(config, KIND, resolve_model)
    assert tokens.counts.dropped == {"empty negative": 1}
    assert prepare_tokens(config, KIND, resolve_model).train_folder == tokens.train_folder
    dataset, _ = tokens.open(TripletKind.columns)
    batch = collate([dataset[index] for index in range(8)])
    decode = load_tokenizer(Path(tokens.tokenizer_path)).decode
    assert [decode(part[4].tolist())[:4] for part in batch] == ["a5", "is 5", "no n"]
    stream = prepare_stream(config, KIND, resolve_model).dataset
    samples, counts = stream.read([(0, index) for index in range(9)])
    assert counts.dropped == {"empty negative": 1}
    assert all(map(torch.equal, collate(samples), batch))

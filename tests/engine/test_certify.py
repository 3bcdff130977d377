"""A rank's part of the certificate: dropout that is off wherever it stands, weights compared part by part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.core.errors import RunError
from paceline.engine.certify import distances, num_positions, turn_off_dropout
from paceline.parallel.parts import Part


class Attention(nn.Module):
    """Keeps its dropout as a number, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.1
        self.scale = 0.5
        self.config = SimpleNamespace(hidden_dropout_prob=0.2, initializer_range=0.02)


def test_every_dropout_of_a_model_is_turned_off() -> None:
    model = nn.Sequential(
        nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.1), Attention()), nn.Dropout(0.0), nn.LSTM(2, 2, 2, dropout=0.4)
    )
    assert turn_off_dropout(model) == 5
    attention = model[1][1]
    assert (model[0].p, model[1][0].p, attention.attention_dropout, model[3].dropout) == (0, 0, 0, 0)
    assert (attention.scale, attention.config.hidden_dropout_prob, attention.config.initializer_range) == (0.5, 0.0, 0.02)
    x = torch.ones(2, 5)
    assert torch.equal(model[0](x), x)
    assert turn_off_dropout(model) == 0


def test_positions_are_tokens_with_padding_or_rows() -> None:
    assert num_positions({"input_ids": torch.zeros(2, 7), "num_tokens": 9}) == 14
    assert num_positions((torch.zeros(3, 1, 8, 8), torch.zeros(3))) == 3


def strategy(*parts: Part) -> Any:
    return SimpleNamespace(state=lambda: list(parts))


def test_boxes_and_flat_ranges_are_held_against_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    whole = torch.arange(12.0).reshape(3, 4)
    save_file({"model/w": whole, "model/b": torch.ones(2), "model/s": torch.tensor(3.0)}, str(path))
    box = Part("model/w", whole[1:, 2:] + 0.5, (3, 4), (1, 2))
    flat = Part("model/w", whole.reshape(-1)[:5] - 1, (3, 4), (0,), flat=True)
    scalar = Part.whole("model/s", torch.tensor(5.0))
    buffer = Part.whole("buffer/mean", torch.ones(2))
    found = distances(strategy(box, flat, scalar, buffer), path)
    assert found["model/w"] == pytest.approx([4 * 0.25 + 5 * 1.0, 9, float(whole.square().sum()), 12])
    assert found["model/s"] == [4.0, 1, 9.0, 1]
    assert found["model/b"] == [0.0, 0, 2.0, 2]  # this rank owns nothing of it
    with pytest.raises(RunError, match="model/new"):
        distances(strategy(Part.whole("model/new", torch.ones(1))), path)
    with pytest.raises(RunError, match="has the shape"):
        distances(strategy(Part.whole("model/b", torch.ones(3))), path)

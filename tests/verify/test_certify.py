"""Test the work of a rank in `paceline verify`: disabling dropout and comparing weights by
shards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.core.errors import RunError
from paceline.observe.report.certificate import Certificate, excluded_text, summary
from paceline.parallel.state import TensorShard
from paceline.tasks.base import num_positions
from paceline.verify.certificate import weight_difference
from paceline.verify.worker import (
    GradientWatch,
    distances,
    excluded_report,
    save_reference,
    turn_off_dropout,
)


class Attention(nn.Module):
    """Stores its dropout as a number, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.1
        self.scale = 0.5
        self.config = SimpleNamespace(hidden_dropout_prob=0.2, initializer_range=0.02)


def test_summary_tells_that_all_modes_were_refused() -> None:
    refused = {"mode": "tensor", "ok": None}
    certificate = {"reference": "single", "modes": [refused], "excluded": [{"elements": 5}]}
    text = summary(cast("Certificate", certificate))
    assert text == "No mode was compared with single: all were refused."


def test_turns_off_every_dropout() -> None:
    model = nn.Sequential(
        nn.Dropout(0.3),
        nn.Sequential(nn.Dropout2d(0.1), Attention()),
        nn.Dropout(0.0),
        nn.LSTM(2, 2, 2, dropout=0.4),
    )
    assert turn_off_dropout(model) == 5
    attention = model[1][1]
    assert (model[0].p, model[1][0].p, attention.attention_dropout, model[3].dropout) == (
        0,
        0,
        0,
        0,
    )
    assert (
        attention.scale,
        attention.config.hidden_dropout_prob,
        attention.config.initializer_range,
    ) == (0.5, 0.0, 0.02)
    x = torch.ones(2, 5)
    assert torch.equal(model[0](x), x)
    assert turn_off_dropout(model) == 0


def test_num_positions_counts_padded_tokens_or_rows() -> None:
    assert num_positions({"input_ids": torch.zeros(2, 7), "num_tokens": 9}) == 14
    assert num_positions((torch.zeros(3, 1, 8, 8), torch.zeros(3))) == 3


def strategy(*shards: TensorShard) -> Any:
    return SimpleNamespace(state_shards=lambda: list(shards))


def test_compares_boxes_and_flat_ranges_with_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    full = torch.arange(12.0).reshape(3, 4)
    save_file({"model/w": full, "model/b": torch.ones(2), "model/s": torch.tensor(3.0)}, str(path))
    box = TensorShard("model/w", full[1:, 2:] + 0.5, (3, 4), (1, 2))
    flat = TensorShard("model/w", full.reshape(-1)[:5] - 1, (3, 4), (0,), flat=True)
    scalar = TensorShard.full("model/s", torch.tensor(5.0))
    buffer = TensorShard.full("buffer/mean", torch.ones(2))
    sums = distances(strategy(box, flat, scalar, buffer), path)
    assert sums["model/w"] == pytest.approx(
        [4 * 0.25 + 5 * 1.0, 9, float(full.square().sum()), 12, 12]
    )
    assert sums["model/s"] == [4.0, 1, 9.0, 1, 1]
    assert sums["model/b"] == [0.0, 0, 2.0, 2, 2]  # this rank has no shard of it
    with pytest.raises(RunError, match="model/new"):
        distances(strategy(TensorShard.full("model/new", torch.ones(1))), path)
    with pytest.raises(RunError, match="has the shape"):
        distances(strategy(TensorShard.full("model/b", torch.ones(3))), path)


def test_excluded_elements_are_neither_different_nor_missing(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    bias, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(3)
    reference_strategy = strategy(
        TensorShard.full("model/bias", bias), TensorShard.full("model/other", other)
    )
    save_reference(reference_strategy, path, {"bias": torch.tensor([False, True, True, False])})
    moved = [
        TensorShard("model/bias", bias[:2] + torch.tensor([0.0, 9.0]), (4,), (0,)),
        TensorShard("model/bias", bias[2:], (4,), (2,)),
    ]
    sums = distances(strategy(*moved, TensorShard.full("model/other", other + 1e-3)), path)
    assert sums["model/bias"] == [0.0, 4, 17.0, 4, 2]
    assert weight_difference([sums]) == (pytest.approx(1e-3, rel=1e-3), "model/other", [])


def find_negligible(
    model: nn.Module, steps: int, loss: Any
) -> dict[str, tuple[float, torch.Tensor]]:
    shards = [
        TensorShard.full(name, parameter, key=parameter)
        for name, parameter in model.named_parameters()
    ]
    reference_strategy = SimpleNamespace(
        tensor_shards=lambda: shards, clip_grad_norm=lambda norm: torch.ones(())
    )
    watch = GradientWatch(reference_strategy)  # type: ignore[arg-type]
    for step in range(steps):
        model.zero_grad()
        loss(step).backward()
        reference_strategy.clip_grad_norm(1.0)
    return watch.negligible()


def glm(seed: int = 0) -> Any:
    from transformers import Glm4Config, Glm4ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "pad_token_id": 0,
    }
    return Glm4ForCausalLM(Glm4Config(**sizes, **heads))


def test_excludes_only_key_biases_without_rotary_embedding() -> None:
    model = glm()  # rotary embedding turns half of each head's 8 dimensions

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    excluded = find_negligible(model, 3, loss)
    assert set(excluded) == {f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(2)}
    for ratio, mask in excluded.values():
        assert 0 < ratio < 1e-6
        assert mask.tolist() == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    certificate = {"excluded": excluded_report(excluded), "reference": "single"}
    assert {"elements": 8, "of": 16}.items() <= certificate["excluded"][0].items()
    assert "16 weights in 2 tensors are not compared" in excluded_text(certificate)
    assert excluded_text({"excluded": [], "reference": "single"}) == ""


def test_excludes_at_most_one_percent_and_only_small_gradients() -> None:
    model = nn.ParameterDict(
        {
            "large": nn.Parameter(torch.ones(2000, 1)),
            "never": nn.Parameter(torch.ones(3)),
            "tiny": nn.Parameter(torch.ones(5, 3)),
            "wide": nn.Parameter(torch.ones(10, 3)),
            "late": nn.Parameter(torch.ones(2, 2)),
        }
    )
    scale = {"tiny": 1e-12, "wide": 1e-11, "late": 1e-12, "large": 1.0, "never": 0.0}

    def loss(step: int) -> torch.Tensor:
        return sum(
            ((scale[name] if (name, step) != ("late", 2) else 1e-3) * parameter).sum()
            for name, parameter in model.items()
        )

    assert list(find_negligible(model, 3, loss)) == [
        "tiny"
    ]  # with "wide" it would be 45 elements of 2,052

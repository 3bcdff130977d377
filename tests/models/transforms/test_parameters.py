"""Selection of parameters by their names."""

import pytest
from raised import raises_error
from torch import nn

from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.models.transforms.parameters import (
    ParameterSettings,
    freeze_parameters,
    parameter_settings,
)
from paceline.train.optimizers.build import build_optimizer, matrices_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def trained(**settings: object) -> set[str]:
    model = Tied()
    freeze_parameters(model, TrainArgs(**settings))
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_selects_trained_parameters() -> None:
    layers = [{f"layers.{n}.weight", f"layers.{n}.bias"} for n in range(3)]
    everything = {"embed.weight"}.union(*layers)
    assert trained() == everything
    assert trained(freeze=["head"]) == everything - {"embed.weight"}  # a name of a tied weight
    assert trained(freeze=[r"layers\.[01]\."]) == {"embed.weight"} | layers[2]
    assert trained(trainable=["bias$"]) == {f"layers.{n}.bias" for n in range(3)}
    assert trained(trainable_layers=1) == layers[2]
    assert trained(trainable_layers=-2) == layers[0] | layers[1]
    assert trained(trainable_layers=1, trainable=["embed"]) == {"embed.weight"} | layers[2]
    assert trained(trainable_layers=1, freeze=["bias"]) == {"layers.2.weight"}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"freeze": ["lm_head"]}, "unknown-parameter"),
        ({"freeze": [""]}, "nothing-trained"),
        ({"trainable_layers": 4}, "too-many-trainable-layers"),
    ],
)
def test_rejects_selections_of_nothing(settings: dict[str, object], code: str) -> None:
    with raises_error(ConfigError, code=code):
        trained(**settings)
    with pytest.raises(ValueError, match="not a valid regular expression"):
        TrainArgs(freeze=["(a"])
    with pytest.raises(ValueError, match="not supported with lora"):
        Config(model="m", dataset="d", lora={"enable": True}, train_args={"trainable": ["a"]})


def test_groups_have_their_own_learning_rate_and_decay() -> None:
    groups = [
        {"params": ["head"], "learning_rate": 1e-4},
        {"params": ["bias", "embed"], "weight_decay": 0.3},
    ]
    args = {"weight_decay": 0.1, "parameter_groups": groups}
    config = Config(model="m", dataset="d", train_args=args)
    model = Tied()
    settings = parameter_settings(model, config, 1e-3)
    assert settings["embed.weight"] == ParameterSettings(1e-4)  # the first group applies
    assert settings["layers.0.bias"] == ParameterSettings(None, 0.3)
    optimizer = build_optimizer(
        config.train_args, 1e-3, list(model.named_parameters()), matrices_of(model), frozenset(),
        settings,
    )  # fmt: skip
    names = {param: name for name, param in model.named_parameters()}
    result = {
        names[param]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert result["embed.weight"] == (1e-4, 0.1)
    assert result["layers.1.weight"] == (1e-3, 0.1)
    assert result["layers.1.bias"] == (1e-3, 0.3)
    assert len(result) == 7

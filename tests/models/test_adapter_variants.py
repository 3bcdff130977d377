"""Variants of LoRA and quantized weights: what they start from, what is saved, and what they
refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family, write_config
from merged_models import write_merged
from raised import raises_error
from ranks import run_ranks
from safetensors.torch import load_file
from test_adapters import config_for, logits

from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.inference.loading import load_model
from paceline.models.adapters.check import check_adapters
from paceline.models.adapters.initialization import subtract_adapters
from paceline.models.adapters.lora import adapter_notices, learning_rate_factors
from paceline.models.adapters.quantize import dequantized, quantize_layers, scale_tensors
from paceline.models.adapters.targets import adapter_layers
from paceline.models.language import (
    language_model_on_meta,
    load_language_model,
    save_language_model,
)
from paceline.models.shape.outline import outline
from paceline.models.transforms.parameters import parameter_settings
from paceline.parallel.registry import check_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of

ALONE = Communicator(RankEnv(), torch.device("cpu"))
soak = pytest.mark.soak
VARIANTS = [
    {"use_dora": True, "use_rslora": True},
    {"init_lora_weights": "pissa", "use_rslora": True},
    {"method": "vera", "rank": 16},
    {"quantize": "nf4"},
    *(
        pytest.param(variant, marks=soak)
        for variant in (
            {"init_lora_weights": "gaussian"},
            {"init_lora_weights": "orthogonal"},
            {"init_lora_weights": "olora"},
            {"init_lora_weights": "pissa_niter_4"},
            {"quantize": "fp4", "double_quant": False},
            {"quantize": "nf4", "use_dora": True},
            {"quantize": "nf4", "method": "vera", "rank": 16},
            {"quantize": "int8"},
        )
    ),
]


def build(config: Config) -> Any:
    """Build the model as a single rank does."""
    torch.manual_seed(0)
    model = load_language_model(config)
    subtract_adapters(model, config, ALONE)
    return model


def train(model: Any) -> None:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        ids = torch.randint(0, 8192, (2, 16), generator=generator)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
@pytest.mark.parametrize("lora", VARIANTS, ids=lambda lora: "-".join(map(str, lora.values())))
def test_variant_trains_reloads_with_peft_and_merges(lora: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    quantized = "quantize" in lora
    if quantized:
        pytest.importorskip("bitsandbytes")
    base = make_family("qwen2", tmp_path / "base")
    config = config_for(base, lora={"dropout": 0.0, **lora})
    check_adapters(config)
    model = build(config)
    planned = outline(language_model_on_meta(config), config)
    built = outline(model, config)
    assert planned.parameters == built.parameters
    assert planned.buffers == built.buffers

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    start = logits(model.eval())
    if quantized:
        assert not torch.equal(start, logits(plain))
        assert planned.num_parameters >= plain.num_parameters()
        assert built.parameter_bytes < 4 * plain.num_parameters()
        quantize_layers(plain, config)
    torch.testing.assert_close(start, logits(plain), rtol=1e-4, atol=1e-5)

    train(model)
    expected = logits(model)
    assert not torch.allclose(expected, start, atol=1e-4)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    save_language_model(model, None, run / "model")
    assert torch.equal(logits(model), expected)  # saving leaves the model as it is
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(plain, str(run / "model"))), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_loftq_starts_from_the_rounding_error(quantize: str, tmp_path: Path) -> None:
    """The start is closer to the original weights, by the largest singular values of the error."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pytest.importorskip("bitsandbytes")
    base = make_family("qwen2", tmp_path / "base")
    original = build(config_for(base, lora={"dropout": 0.0}))
    lora = {"dropout": 0.0, "quantize": quantize, "init_lora_weights": "loftq", "rank": 4}
    config = config_for(base, lora=lora)
    check_adapters(config)
    model = build(config)
    for name, layer in adapter_layers(model):
        weight = original.get_submodule(name).get_base_layer().weight
        error = weight - dequantized(layer.get_base_layer())
        up, down = (matrix["default"].weight.detach() for matrix in (layer.lora_B, layer.lora_A))
        rest = error - layer.scaling["default"] * up @ down
        smallest = torch.linalg.svdvals(error)[4:].norm()
        assert rest.norm().item() == pytest.approx(smallest.item(), rel=0.01)
    planned = outline(language_model_on_meta(config), config)
    assert planned.parameters == outline(model, config).parameters

    train(model)
    expected = logits(model)
    save_language_model(model, None, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    quantize_layers(plain, config)
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)


def test_merge_adds_the_update_to_the_quantized_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from paceline.models.builtin import resolve_model

    base = make_family("qwen2", tmp_path / "base")
    config = config_for(base, lora={"dropout": 0.0, "quantize": "nf4"})
    model = build(config)
    train(model)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    save_language_model(model, resolve_model("builtin:qwen2-micro"), run / "model")
    (run / "config.yaml").write_text(to_yaml(config))
    merged = load_model(write_merged(run))[0]
    assert not list(scale_tensors(merged))
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-3, atol=1e-4)
    (run / "config.yaml").unlink()  # on the weights of the files the adapter computes other logits
    assert not torch.allclose(logits(load_model(run)[0]), logits(model), atol=1e-3)


def test_quantizes_linear_layers_of_a_mixture_only(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = config_for(write_config("mixtral", tmp_path / "moe"), lora={"quantize": "nf4"})
    notices = " ".join(text for _, text in adapter_notices(language_model_on_meta(config), config))
    assert "lora.quantize: nf4 does not apply to mlp.experts" in notices
    config = config_for(write_config("gpt2", tmp_path / "gpt2"), lora={"quantize": "nf4"})
    with raises_error(ConfigError, code="quantize-without-linear-layers", naming="lora.quantize"):
        language_model_on_meta(config)


def test_saved_difference_has_twice_the_rank(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    model = build(config_for(base, lora={"init_lora_weights": "pissa", "rank": 4}))
    save_language_model(model, None, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in saved.items() if "lora_A" in name} == {8}
    assert model.peft_config["default"].r == 4
    for name, up in saved.items():
        if "lora_B" in name:  # not trained: the difference is zero
            update = up @ saved[name.replace("lora_B", "lora_A")]
            assert update.abs().max() < 1e-6


def test_ranks_divide_the_decomposition(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    alone = _initial_adapters(ALONE, base)
    for result in run_ranks(_initial_adapters, 2, base):
        assert result.keys() == alone.keys()
        assert all(torch.equal(result[name], values) for name, values in alone.items())


def _initial_adapters(world: Communicator, base: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    config = config_for(base, lora={"init_lora_weights": "pissa"})
    torch.manual_seed(0)
    model = load_language_model(config)
    subtract_adapters(model, config, world)
    return {name: values.detach().clone() for name, values in model.named_parameters()}


def test_lora_plus_has_two_learning_rates(tmp_path: Path) -> None:
    config = config_for(write_config("qwen2", tmp_path), lora={"loraplus_lr_ratio": 8})
    model = language_model_on_meta(config)
    factors = learning_rate_factors(model, config)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    assert factors == {name: 8.0 for name, _ in named if "lora_B" in name}
    optimizer = build_optimizer(
        config.train_args,
        1e-3,
        named,
        matrices_of(model),
        settings=parameter_settings(model, config, 1e-3),
    )
    rates = {
        name: group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, each in named
        if each is parameter
    }
    assert rates == {name: 8e-3 if "lora_B" in name else 1e-3 for name, _ in named}


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ({"enable": False, "quantize": "nf4"}, ("needs-lora", "")),
        ({"method": "vera", "use_dora": True}, ("quantize-not-supported", "lora.use_dora")),
        (
            {"init_lora_weights": "pissa", "quantize": "nf4"},
            ("quantize-not-supported", "lora.quantize"),
        ),
        ({"init_lora_weights": "loftq"}, ("quantize-not-supported", "lora.init_lora_weights")),
        (
            {"init_lora_weights": "loftq", "quantize": "nf4", "use_dora": True},
            ("quantize-not-supported", "lora.init_lora_weights"),
        ),
        (
            {"init_lora_weights": "olora", "use_dora": True},
            ("quantize-not-supported", "lora.init_lora_weights"),
        ),
        (
            {"init_lora_weights": "orthogonal", "rank": 3},
            ("quantize-not-supported", "lora.init_lora_weights"),
        ),
        ({"quantize": "int8", "use_dora": True}, ("quantize-not-supported", "lora.quantize")),
    ],
)
def test_refuses_combinations(lora: dict[str, Any], error: tuple[str, str], tmp_path: Path) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_adapters(config_for(tmp_path, lora=lora))


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ({"init_lora_weights": "pissa"}, ("dora-without-linear-layers", "lora.init_lora_weights")),
        ({"use_dora": True}, ("unfit-target-modules", "use_dora")),
        (
            {"init_lora_weights": "pissa", "rank": 24, "target_modules": ["k_proj"]},
            ("rank-too-large-for-initialization", "lora.init_lora_weights"),
        ),
        (
            {
                "init_lora_weights": "loftq",
                "quantize": "nf4",
                "rank": 24,
                "target_modules": ["k_proj"],
            },
            ("rank-too-large-for-initialization", "lora.init_lora_weights"),
        ),
    ],
)
def test_refuses_variants_that_do_not_fit_the_model(
    lora: dict[str, Any], error: tuple[str, str], tmp_path: Path
) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        language_model_on_meta(config_for(write_config("mixtral", tmp_path), lora=lora))


@pytest.mark.parametrize(
    ("mode", "dims", "lora"),
    [
        ("tensor", {"tensor": 2}, {"quantize": "nf4"}),
        ("tensor", {"tensor": 2}, {"use_dora": True}),
        ("pipeline", {"pipeline": 2}, {"method": "vera"}),
        ("pipeline", {"pipeline": 2}, {"quantize": "nf4"}),
        ("deepspeed", {"data": 2}, {"quantize": "nf4"}),
        ("dp", {"data": 2}, {"quantize": "nf4"}),
        ("local_sgd", {"data": 2}, {"quantize": "nf4"}),
        ("zero3", {"shard": 2}, {"quantize": "int8"}),
    ],
)
def test_strategies_refuse_before_the_start(
    mode: str, dims: dict[str, int], lora: dict[str, Any], tmp_path: Path
) -> None:
    config = config_for(tmp_path, lora=lora, parallel={"mode": mode})
    with raises_error(ConfigError, code="not-supported", naming=next(iter(lora))):
        check_strategy(mode, config, ParallelDims(**dims))

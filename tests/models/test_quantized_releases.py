"""Quantized releases are loaded with the weights that transformers computes, in every way in which
Paceline loads weights, and as ordinary models."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_releases import BLOCK, edit_config, make_release
from raised import raises_error
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Mxfp4Config,
)

import paceline
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.files import check_files
from paceline.models.language import language_model_on_meta, load_language_model
from paceline.models.notices import model_notices
from paceline.models.weights import load as load_module
from paceline.models.weights.converted import converted_copy
from paceline.models.weights.dequantize import dequantize_fp8, dequantize_mxfp4, read_model
from paceline.models.weights.load import convert_weights, deferred_conversion, load_pretrained
from paceline.parallel.strategy import make_strategy

#: Experts in 4 bits; a dense model; experts that are merged; blocks that are cut off at the edge.
FAMILIES = ("gpt_oss", "qwen3", "qwen3_moe", "deepseek_v3")
#: transformers takes blocks that are cut off for smaller blocks, if the weight divides into these.
WHOLE_BLOCKS = {"qwen3_moe": {"moe_intermediate_size": 32}}


def make_config(model: Path, precision: str = "32", **values: Any) -> Config:
    args = {"max_length": 64, "precision": precision}
    return Config.model_validate(
        {"model": str(model), "dataset": "d", "train_args": args, **values}
    )


def by_transformers(release: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights that transformers dequantizes. It leaves some that are not quantized in
    bfloat16."""
    is_mxfp4 = "gpt_oss" in release.name
    settings: Any = Mxfp4Config if is_mxfp4 else FineGrainedFP8Config
    model = AutoModelForCausalLM.from_pretrained(
        str(release), quantization_config=settings(dequantize=True), dtype=dtype
    )
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}


def check_equal(model: Any, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


def plain_state(plain: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(str(plain), dtype=dtype)
    return dict(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    release, plain = make_release(family, tmp_path, **WHOLE_BLOCKS.get(family, {}))
    for dtype in (torch.float32, torch.bfloat16):
        model = load_pretrained(AutoModelForCausalLM, str(release), dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        check_equal(model, plain_state(plain, dtype))
        if family != "deepseek_v3":  # transformers rejects blocks that are cut off
            check_equal(model, by_transformers(release, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_an_ordinary_model(family: str, tmp_path: Path) -> None:
    release, _ = make_release(family, tmp_path)
    model = load_language_model(make_config(release, precision="bf16-true"))
    model.save_pretrained(str(tmp_path / "saved"))
    saved = tmp_path / "saved"
    assert "quantization" not in (saved / "config.json").read_text()
    kept = "mlp.gate.e_score_correction_bias"  # transformers keeps it in float32
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16 or name.endswith(kept), name
    again, info = AutoModelForCausalLM.from_pretrained(
        str(saved), dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_equal(again, dict(model.state_dict()))


@pytest.mark.parametrize(("family", "is_exact"), [("gpt_oss", True), ("deepseek_v3", False)])
def test_deferred_conversion(family: str, is_exact: bool, tmp_path: Path) -> None:
    """Weights of MXFP4 wait in bfloat16, which represents them exactly; weights of FP8 cannot."""
    release, plain = make_release(family, tmp_path)
    with deferred_conversion():
        model = load_language_model(make_config(release))
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.bfloat16} if is_exact else {torch.bfloat16, torch.float32}
    convert_weights(model.parameters())
    check_equal(model, plain_state(plain))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_copy_that_ranks_share(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, _ = make_release(family, tmp_path, **WHOLE_BLOCKS.get(family, {}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = converted_copy(AutoModelForCausalLM, str(release), torch.bfloat16, 0)
    assert copy is not None
    model = AutoModelForCausalLM.from_pretrained(str(copy), dtype="auto")
    check_equal(model, by_transformers(release, torch.bfloat16))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_ranks_of_a_host_load_the_copy(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is made once, also for weights that are trained, and the model is the release's."""
    release, plain = make_release(family, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(load_module, "converted_copy", partial(converted_copy, min_bytes=0))
    with deferred_conversion():
        model = load_language_model(make_config(release))
    copies = list((tmp_path / "cache" / "paceline" / "models").glob("*-release-*"))
    assert [copy.name.split("-")[2] for copy in copies] == [
        "bfloat16" if family == "gpt_oss" else "float32"
    ]
    assert model.name_or_path == str(release)
    convert_weights(model.parameters())
    check_equal(model, plain_state(plain))


def shards_equal(world: Communicator, release: str, plain: str) -> dict[str, bool]:
    """Return, by mode, whether the shards of a release equal the plain model's shards."""
    layouts = {
        "zero3": ("zero3", ParallelDims(shard=2)),
        "pipeline": ("hybrid", ParallelDims(pipeline=2)),
    }
    if "gpt_oss" not in release:  # transformers has no plan for splitting its layers
        layouts["tensor"] = ("hybrid", ParallelDims(tensor=2))
    results = {}
    for name, (mode, axes) in layouts.items():
        shards = []
        for folder in (release, plain):
            config = make_config(Path(folder), precision="bf16-mixed")
            strategy = make_strategy(mode, config, Communicator(world.env, world.device, axes))
            with strategy.model_init_context():
                model = load_language_model(config)
            strategy.setup(model)
            shards.append(list(strategy.tensor_shards()))
        results[name] = len(shards[0]) == len(shards[1]) and all(
            each.name == other.name and torch.equal(each.tensor, other.tensor)
            for each, other in zip(*shards, strict=True)
        )
    return results


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_shards_of_a_release(family: str, tmp_path: Path) -> None:
    release, plain = make_release(family, tmp_path)
    for results in run_ranks(shards_equal, 2, str(release), str(plain)):
        assert results == dict.fromkeys(results, True)


# -- formats
def rewrite(release: Path, change: Any) -> None:
    """Replace the tensors of a model by what ``change`` returns for them."""
    file = release / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_compressed_tensors_with_8_bit_numbers(scales: str, tmp_path: Path) -> None:
    release, plain = make_release("qwen3", tmp_path)
    expected = {}

    def quantize_rows(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = {}
        for name, tensor in tensors.items():
            if name.endswith("_scale_inv"):
                continue
            result[name] = tensor
            if tensor.dtype == torch.float8_e4m3fn:
                shape = (tensor.shape[0], 1) if scales == "row" else (1,)
                scale = torch.rand(shape).bfloat16() + 0.5
                result[name.replace("weight", "weight_scale")] = scale
                result[name.replace("weight", "input_scale")] = torch.ones(1)
                expected[name] = tensor.float() * scale.float()
        return result

    rewrite(release, quantize_rows)
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}}
    described = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    edit_config(release, quantization_config={**described, "config_groups": groups})
    model, info = read_model(AutoModelForCausalLM, str(release), dtype=torch.float32)
    assert not info["unexpected_keys"]
    assert expected
    check_equal(model, plain_state(plain) | expected)


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)

    def store_exponents(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: torch.randint(110, 130, tensor.shape).byte() if "scale_inv" in name else tensor
            for name, tensor in tensors.items()
        }

    rewrite(release, store_exponents)
    method = {"quant_method": "mxfp8", "weight_block_size": list(BLOCK)}
    edit_config(release, quantization_config=method)
    model = load_pretrained(AutoModelForCausalLM, str(release), dtype=torch.float32)
    check_equal(model, by_transformers(release, torch.float32))


def test_every_number_and_exponent_of_mxfp4() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16)
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).repeat(2) * signs
    for exponent in (0, 1, 127, 200, 252):
        scales = torch.full((1, 16, 1), exponent, dtype=torch.uint8)
        weights = dequantize_mxfp4(blocks, scales).double()
        for byte in range(256):
            row, column = byte // 16, 2 * (byte % 16)
            pair = torch.stack([weights[0, column, row], weights[0, column + 1, row]])
            expected = values[[byte & 15, byte >> 4]].double() * 2.0 ** (exponent - 127)
            assert torch.equal(pair, expected)


def test_blocks_that_are_cut_off_keep_their_size() -> None:
    """192 rows in blocks of 128 are blocks of 128 and 64 rows, not two of 96."""
    numbers = torch.ones(192, 2).to(torch.float8_e4m3fn)
    weight = dequantize_fp8(numbers, torch.tensor([[1.0], [2.0]]), (128, 128))
    assert weight[:128].eq(1).all()
    assert weight[128:].eq(2).all()
    equal = dequantize_fp8(numbers, torch.tensor([[1.0], [2.0]]))
    assert equal[:96].eq(1).all()
    assert equal[96:].eq(2).all()


# -- refused
@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"format": "pack-quantized"}, "format pack-quantized"),
        (
            {"format": "float-quantized", "config_groups": {"a": {"weights": {"type": "int"}}}},
            "weights of type int",
        ),
        (
            {"format": "float-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights",
        ),
    ],
)
def test_other_formats_are_refused(method: dict[str, Any], named: str, tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)
    if "format" in method:
        method = {"quant_method": "compressed-tensors", **method}
    edit_config(release, quantization_config=method)
    config = make_config(release)
    for load in (check_files, language_model_on_meta, load_language_model):
        with raises_error(ConfigError, code="unsupported-quantized-release", naming=named):
            load(config)
    with raises_error(ConfigError, code="unsupported-quantized-release", naming=named):
        paceline.plan({"model": str(release), "dataset": "d"})


def test_quantized_weights_without_scales_are_refused(tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)
    missing = "model.layers.1.mlp.up_proj.weight"
    rewrite(
        release,
        lambda all_: {name: each for name, each in all_.items() if f"{missing}_" not in name},
    )
    for load in (check_files, load_language_model):
        with raises_error(ConfigError, code="quantized-weight-without-scales", naming=missing):
            load(make_config(release))


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)
    changed = "model.layers.1.mlp.up_proj.weight"
    rewrite(release, lambda tensors: tensors | {f"{changed}_scale_inv": torch.ones(7, 5)})
    with raises_error(ConfigError, code="quantized-weight-unreadable", naming=changed):
        load_language_model(make_config(release))


# -- memory
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_plan_is_the_plan_of_the_plain_model(family: str, lora: bool, tmp_path: Path) -> None:
    release, plain = make_release(family, tmp_path)
    plans = []
    for folder in (release, plain):
        config = make_config(folder, "bf16-mixed", lora={"enable": lora}).model_dump(
            mode="json", exclude_unset=True
        )
        plans.append(paceline.plan(config, world_size=2, uses_history=False))
    memory = [{mode["mode"]: mode["memory_bytes"] for mode in plan["modes"]} for plan in plans]
    if lora:  # ranks share frozen weights that the files store in bfloat16, as those of a release
        memory = [{"single": modes["single"]} for modes in memory]
    assert memory[0] == memory[1]
    assert plans[0]["parameters"] == plans[1]["parameters"]
    assert sum("dequantized" in note for note in plans[0]["notes"]) == 1
    assert not any("dequantized" in note for note in plans[1]["notes"])


@pytest.mark.parametrize(("family", "name"), [("gpt_oss", "MXFP4"), ("deepseek_v3", "FP8")])
def test_notice_states_the_sizes(family: str, name: str, tmp_path: Path) -> None:
    release, _ = make_release(family, tmp_path)
    config = make_config(release, precision="bf16-true")
    model = language_model_on_meta(config)
    assert not hasattr(model.config, "quantization_config")
    notice = next(
        text
        for _, text in model_notices(model, config)
        if getattr(text, "code", "") == "weights-dequantized"
    )
    from paceline.core.files import human_bytes

    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    stored = (release / "model.safetensors").stat().st_size
    assert notice.values == {
        "format": name,
        "dtype": "bfloat16",
        "size": human_bytes(size),
        "stored_size": human_bytes(stored),
    }


def test_the_model_of_another_config_is_unchanged(tmp_path: Path) -> None:
    """A config that a caller passes keeps what its config.json says."""
    release, _ = make_release("qwen3", tmp_path)
    config = AutoConfig.from_pretrained(str(release))
    load_pretrained(AutoModelForCausalLM, str(release), config=config, dtype=torch.float32)
    assert config.quantization_config["quant_method"] == "fp8"


def test_own_code_of_a_release_is_refused(tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)
    (release / "own_config.py").write_text(
        "from transformers import Qwen3Config\n\n\nclass OwnConfig(Qwen3Config):\n"
        "    model_type = 'own'\n"
    )
    edit_config(release, model_type="own", auto_map={"AutoConfig": "own_config.OwnConfig"})
    with raises_error(ConfigError, code="quantized-release-with-own-code", naming="FP8"):
        load_language_model(make_config(release, trust_remote_code=True))

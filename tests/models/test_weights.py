"""Weights are mapped from their files and shared by the ranks of a host, and are those that
transformers loads."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.language import load_language_model
from paceline.models.weights.converted import converted_copy
from paceline.models.weights.load import (
    convert_weights,
    converted_weights,
    deferred_conversion,
    final_dtype,
    is_from_files,
    load_pretrained,
    move_model,
)
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.state import TensorShard
from paceline.parallel.strategy import make_strategy

#: Tied weights, transposed weights, merged experts, a gate with a buffer, a state-space model.
QUICK_FAMILIES = ("gemma", "gpt2", "mixtral", "deepseek_v3", "mamba")


def save_in_bfloat16(name: str, folder: Path, max_shard_size: str = "5GB") -> str:
    model = AutoModelForCausalLM.from_pretrained(make_model(name, folder), dtype=torch.bfloat16)
    target = folder / f"{name}-bf16"
    model.save_pretrained(str(target), max_shard_size=max_shard_size)
    return str(target)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: tensor.detach() for name, tensor in named}


def load(folder: str, defers: bool) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    if not defers:
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with deferred_conversion():
        return load_pretrained(AutoModelForCausalLM, folder, config=config, dtype=torch.float32)


def check_same_weights(folder: str) -> None:
    expected, model = load(folder, defers=False), load(folder, defers=True)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    # transformers writes weights that it keeps in float32, such as those of some routers, so.
    assert torch.bfloat16 in dtypes <= {torch.bfloat16, torch.float32}
    assert {final_dtype(parameter) for parameter in model.parameters()} == {torch.float32}
    convert_weights(model.parameters())
    loaded = tensors_of(model)
    assert loaded.keys() == tensors_of(expected).keys()
    for name, tensor in tensors_of(expected).items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
    tied = len(list(expected.parameters()))
    assert len(list(model.parameters())) == tied
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.config.name_or_path == expected.config.name_or_path


@pytest.mark.parametrize("name", QUICK_FAMILIES)
def test_deferred_weights_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_same_weights(save_in_bfloat16(name, tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {*QUICK_FAMILIES, "ernie4_5_moe"}))
def test_deferred_weights_of_all_families(name: str, tmp_path: Path) -> None:
    # ernie4_5_moe stores some weights in float32
    check_same_weights(save_in_bfloat16(name, tmp_path))


def test_sharded_files_and_missing_weights(tmp_path: Path) -> None:
    """A model in several files, one of which lacks a weight that transformers then initializes."""
    folder = save_in_bfloat16("llama", tmp_path, max_shard_size="200KB")
    files = sorted(Path(folder).glob("model-*.safetensors"))
    assert len(files) > 1
    missing = "model.layers.1.mlp.up_proj.weight"
    for file in files:
        tensors = load_file(file)
        if tensors.pop(missing, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
    expected, model = load(folder, defers=False), load(folder, defers=True)
    parameter = model.get_parameter(missing)
    assert parameter.dtype == torch.float32
    assert not is_from_files(parameter)
    assert is_from_files(model.get_parameter("model.layers.0.mlp.up_proj.weight"))
    convert_weights(model.parameters())
    loaded = tensors_of(model)
    assert all(torch.equal(loaded[name], value) for name, value in tensors_of(expected).items())


@pytest.mark.parametrize("name", ["gemma", "mixtral"])
def test_forward_with_deferred_weights(name: str, tmp_path: Path) -> None:
    folder = save_in_bfloat16(name, tmp_path)
    expected, model = load(folder, defers=False), load(folder, defers=True)
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad(), converted_weights(model):
        logits = model(input_ids=ids).logits
    assert torch.equal(logits, expected.eval()(input_ids=ids).logits)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    move_model(model, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_full_precision_files_are_mapped_and_never_written(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    model = load(str(folder), defers=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3_next"])
def test_converted_copy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in another dtype, with merged experts, is the model that transformers loads."""
    folder = str(make_model(name, tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = AutoConfig.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    copy = converted_copy(AutoModelForCausalLM, folder, torch.bfloat16, 0, config=config)
    assert copy is not None
    again = converted_copy(AutoModelForCausalLM, folder, torch.bfloat16, 0, config=config)
    assert again == copy
    assert converted_copy(AutoModelForCausalLM, folder, torch.bfloat16, config=config) is None
    model = AutoModelForCausalLM.from_pretrained(copy, config=config, dtype=torch.bfloat16)
    loaded = tensors_of(model)
    assert loaded.keys() == tensors_of(expected).keys()
    for key, tensor in tensors_of(expected).items():
        assert loaded[key].dtype == tensor.dtype, key
        assert torch.equal(loaded[key], tensor), key
    mapped = (copy / "model.safetensors").stat().st_ino
    for parameter in model.parameters():
        assert inode_at(parameter.data_ptr()) == mapped


def inode_at(address: int) -> int:
    """Return the inode of the file that is mapped at an address of this process, or 0."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, inode, *_ = line.split()
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return int(inode)
    return 0


# -- on several ranks
def make_config(model: str, lora: bool = False) -> Config:
    values = {
        "model": model,
        "dataset": "d",
        "train_args": {"precision": "bf16-mixed", "max_length": 64},
        "lora": {"enable": lora, "rank": 4},
    }
    return Config.model_validate(values)


def local_shards(
    world: Communicator, mode: str, axes: ParallelDims, config: Config, defers: bool
) -> list[TensorShard]:
    world = Communicator(world.env, world.device, axes)
    strategy = make_strategy(mode, config, world)
    if defers:
        with strategy.model_init_context():
            model = load_language_model(config)
        assert any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    else:
        model = load_language_model(config)
    strategy.setup(model)
    return list(strategy.tensor_shards())


def compare_shards(world: Communicator, folder: str) -> dict[str, bool]:
    config = make_config(folder)
    layouts = {
        "zero2": ("zero2", ParallelDims(shard=2)),
        "zero3": ("zero3", ParallelDims(shard=2)),
        "tensor": ("hybrid", ParallelDims(tensor=2)),
        "pipeline": ("hybrid", ParallelDims(pipeline=2)),
    }
    results = {}
    for name, (mode, axes) in layouts.items():
        expected = local_shards(world, mode, axes, config, defers=False)
        shards = local_shards(world, mode, axes, config, defers=True)
        results[name] = len(shards) == len(expected) and all(
            (each.name, each.shape, each.offset) == (other.name, other.shape, other.offset)
            and each.tensor.dtype == torch.float32
            and torch.equal(each.tensor, other.tensor)
            for each, other in zip(shards, expected, strict=True)
        )
    return results


def test_shards_of_deferred_weights(tmp_path: Path) -> None:
    """A 16-bit checkpoint becomes the same float32 shards, however a strategy divides the model."""
    folder = save_in_bfloat16("qwen2", tmp_path)
    for results in run_ranks(compare_shards, 2, folder):
        assert results == dict.fromkeys(results, True)


def sync_different_files(world: Communicator, folders: list[str]) -> list[tuple[bool, bool]]:
    """Return, for LoRA and full training, whether all weights equal those of rank 0 and whether the
    frozen ones are still those of the file."""
    results = []
    for lora in (True, False):
        model = load_language_model(make_config(folders[world.rank], lora))
        torch.manual_seed(world.rank)
        for parameter in model.parameters():
            if not is_from_files(parameter):  # adapters
                nn.init.normal_(parameter)
        storages = {name: each.data_ptr() for name, each in model.named_parameters()}
        version = {name: each._version for name, each in model.named_parameters()}
        sync_weights(model, world)
        digests = world.gather_objects(
            float(sum(each.detach().double().abs().sum() for each in model.parameters()))
        )
        untouched = all(
            each.data_ptr() == storages[name] and each._version == version[name]
            for name, each in model.named_parameters()
            if is_from_files(each)
        )
        results.append((len(set(digests)) == 1, untouched))
    return results


def test_rank_zero_weights_reach_ranks_with_other_files(tmp_path: Path) -> None:
    first = save_in_bfloat16("llama", tmp_path)
    same = run_ranks(sync_different_files, 2, [first, first])
    assert same == [[(True, True)] * 2] * 2
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    second = str(tmp_path / "other")
    model.save_pretrained(second)
    different = run_ranks(sync_different_files, 2, [first, second])
    assert [equal for rank in different for equal, _ in rank] == [True] * 4
    assert different[1] == [(True, False)] * 2  # rank 1 received the weights of rank 0


# -- memory
def memory_bytes(world: Communicator) -> int:
    """Return the sum of the ranks' proportional set sizes: shared pages count once."""
    gc.collect()
    world.barrier()
    time.sleep(0.5)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            sizes = world.gather_objects(int(line.split()[1]) * 1024)
            return sum(sizes)
    raise AssertionError("no Pss in smaps_rollup")


def measure_adapted_model(world: Communicator, folder: str) -> tuple[int, int]:
    import peft  # noqa: F401  (an empty rank has imported the same libraries)
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    empty = memory_bytes(world)
    config = make_config(folder, lora=True)
    strategy = make_strategy("ddp", config, world)
    with strategy.model_init_context():
        model = strategy.setup(load_language_model(config))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(8).unsqueeze(0), use_cache=False)
    return empty, memory_bytes(world)


@pytest.mark.soak
def test_ranks_share_frozen_weights(tmp_path: Path) -> None:
    """Four CPU ranks that train adapters on a model of 1 B parameters use little more memory than
    its checkpoint."""
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(tmp_path / "model"))
    del model
    checkpoint = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert checkpoint > 2e9
    for empty, used in run_ranks(
        measure_adapted_model, 4, str(tmp_path / "model"), timeout_s=500.0
    ):
        assert checkpoint < used < 1.3 * checkpoint + empty

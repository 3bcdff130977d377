"""Quantized weights in the cache: the same bits as without the cache, computed once per host."""

import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from merged_models import write_merged
from ranks import run_ranks, server_context
from test_adapter_variants import train
from test_adapters import config_for, logits

from paceline.config.load import to_yaml
from paceline.config.schema import Config
from paceline.core.files import cache_dir
from paceline.distributed.environment import RankEnv
from paceline.inference.loading import load_model
from paceline.models.adapters import quantize
from paceline.models.adapters.quantize import scale_tensors
from paceline.models.builtin import resolve_model
from paceline.models.language import load_language_model, save_language_model

pytest.importorskip("bitsandbytes")
FORMS: list[dict[str, Any]] = [
    {"quantize": "nf4"},
    {"quantize": "fp4", "double_quant": False},
    {"quantize": "int8"},
    {"quantize": "nf4", "init_lora_weights": "loftq"},
]
NUM_LAYERS = 14


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_family("qwen2", tmp_path / "base")


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights that this process quantizes, in order."""
    shapes: list[torch.Size] = []
    pack = quantize._pack

    def recorded(weight: torch.Tensor, lora: Any) -> Any:
        shapes.append(weight.shape)
        return pack(weight, lora)

    monkeypatch.setattr(quantize, "_pack", recorded)
    return shapes


def build(config: Config) -> Any:
    torch.manual_seed(0)
    return load_language_model(config)


def bits(model: Any) -> dict[str, torch.Tensor]:
    """Return everything that a model computes with, as bytes."""
    tensors = {**dict(model.named_parameters()), **dict(scale_tensors(model))}
    for name, module in model.named_modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            tensors[f"{name}.code"] = state.code
            if state.nested:
                tensors |= {f"{name}.offset": state.offset, f"{name}.table": state.state2.code}
    return as_bytes(tensors)


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some 4-bit numbers look like NaN, which does not equal itself."""
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).clone()
        for name, tensor in tensors.items()
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name, values in first.items() if not torch.equal(values, second[name])] == []


def stored_files() -> list[Path]:
    return sorted((cache_dir() / "quantized").glob("*/*/*.safetensors"))


@pytest.mark.parametrize("lora", FORMS, ids=lambda lora: "-".join(map(str, lora.values())))
def test_same_bits_with_and_without_the_cache(
    lora: dict[str, Any],
    base: Path,
    quantized: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = config_for(base, lora={"dropout": 0.0, **lora})
    cold = build(config)
    assert len(quantized) == NUM_LAYERS
    assert f"{NUM_LAYERS} layers quantized in" in caplog.text
    warm = build(config)
    assert len(quantized) == NUM_LAYERS
    assert f"{NUM_LAYERS} layers read from the cache" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    without = build(config)
    assert len(quantized) == 2 * NUM_LAYERS
    assert "they cannot be stored in the cache" in caplog.text
    for model in (warm, without):
        assert_same(bits(model), bits(cold))
        train(model)
    train(cold)
    for model in (warm, without):
        assert_same(bits(model), bits(cold))
        assert torch.equal(logits(model), logits(cold))


@pytest.mark.parametrize("damage", ["truncated", "changed byte", "empty", "no tensors"])
def test_damaged_file_is_built_again(
    damage: str, base: Path, quantized: list[torch.Size], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(base, lora={"quantize": "nf4"})
    expected = bits(build(config))
    file = stored_files()[3]
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[:-1]
    elif damage == "changed byte":
        content[-100] ^= 1
    else:
        content = bytearray() if damage == "empty" else bytearray(b"\x02" + bytes(7) + b"{}")
    file.write_bytes(content)
    quantized.clear()
    assert_same(bits(build(config)), expected)
    assert len(quantized) == 1
    assert f"{file} is damaged and is built again" in caplog.text
    assert_same(bits(build(config)), expected)
    assert len(quantized) == 1


@pytest.mark.parametrize("change", ["weights", "form", "dtype", "scales"])
def test_changes_are_quantized_again(change: str, base: Path, quantized: list[torch.Size]) -> None:
    build(config_for(base, lora={"quantize": "nf4"}))
    lora: dict[str, Any] = {"quantize": "nf4"}
    args = {}
    if change == "weights":
        os.utime(base / "model.safetensors", ns=(1, 1))
    elif change == "form":
        lora = {"quantize": "fp4"}
    elif change == "dtype":
        args = {"precision": "bf16-mixed"}
    else:
        lora = {"quantize": "nf4", "double_quant": False}
    build(config_for(base, lora=lora, train_args=args))
    assert len(quantized) == 2 * NUM_LAYERS


def test_full_disk_is_a_notice(
    base: Path,
    quantized: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_for(base, lora={"quantize": "nf4"})
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    build(config)
    assert len(quantized) == NUM_LAYERS
    assert not stored_files()
    assert "1000 B are free" in caplog.text


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """The mean of many scales does, because each thread adds up its own part."""
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    lora = Config(model="m", dataset="d", lora={"enable": True, "quantize": "nf4"}).lora
    num_threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(as_bytes(quantize._pack(weight, lora)))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_export_rounds_to_the_same_bits(
    precision: str, has_cache: bool, base: Path, tmp_path: Path, quantized: list[torch.Size]
) -> None:
    """Also if the model is written in another dtype than the one in which it was quantized."""
    lora = {"dropout": 0.0, "quantize": "nf4"}
    config = config_for(base, lora=lora, train_args={"precision": precision})
    model = build(config)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    save_language_model(model, resolve_model("builtin:qwen2-micro"), run / "model")
    (run / "config.yaml").write_text(to_yaml(config))
    quantized.clear()
    forget = (lambda: None) if has_cache else (lambda: shutil.rmtree(cache_dir() / "quantized"))
    forget()
    loaded = load_model(run)[0].get_base_model()
    forget()
    merged = load_model(write_merged(run, dtype="bfloat16"))[0]
    assert len(quantized) == (0 if has_cache else 2 * NUM_LAYERS)
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "quant_state"):
            rounded = quantize.dequantized(module)
            assert torch.equal(loaded.get_submodule(name).weight, rounded.float())
            short = name.removesuffix(".base_layer")
            assert torch.equal(merged.get_submodule(short).weight, rounded.bfloat16())
    assert json.loads((run / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


def test_ranks_divide_the_layers(base: Path) -> None:
    """Each layer is quantized once, by ranks that have no process group."""
    first, second = run_ranks(
        _count_and_bits, 2, base, cache_dir().parent, init_process_group=False
    )
    assert first[0] + second[0] == NUM_LAYERS
    assert min(first[0], second[0]) > 0
    assert_same(first[1], second[1])
    assert len(stored_files()) == NUM_LAYERS
    for count, _ in run_ranks(
        _count_and_bits, 2, base, cache_dir().parent, init_process_group=False
    ):
        assert count == 0


def test_another_rank_takes_over_from_a_killed_one(base: Path, quantized: list[torch.Size]) -> None:
    assert _exit_codes({0: None, 1: 3}, base) == [0, -signal.SIGKILL]
    assert len(stored_files()) == NUM_LAYERS
    stored = bits(build(config_for(base, lora={"quantize": "nf4"})))
    assert quantized == []
    for file in stored_files():
        file.unlink()
    assert_same(bits(build(config_for(base, lora={"quantize": "nf4"}))), stored)


def test_killed_run_is_completed_by_the_next(base: Path, quantized: list[torch.Size]) -> None:
    assert _exit_codes({0: 3, 1: 2}, base) == [-signal.SIGKILL] * 2
    num_stored = len(stored_files())
    assert 0 < num_stored < NUM_LAYERS
    build(config_for(base, lora={"quantize": "nf4"}))
    assert len(quantized) == NUM_LAYERS - num_stored
    assert not list((cache_dir() / "quantized").glob("*/.*"))


def _exit_codes(deaths: dict[int, int | None], base: Path) -> list[int | None]:
    """Build the model on ranks, and return their exit codes.

    Args:
        deaths: after how many layers each rank is killed while it quantizes the next one.
    """
    context = server_context()
    arguments = [
        (RankEnv(rank, len(deaths), rank, len(deaths)), base, cache_dir().parent, number)
        for rank, number in deaths.items()
    ]
    processes = [context.Process(target=_count_and_bits, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def _count_and_bits(
    env: RankEnv, base: Path, cache: Path, dies_after: int | None = None
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how many layers this rank has quantized, and the bits of its model."""
    os.environ.update(
        XDG_CACHE_HOME=str(cache),
        RANK=str(env.rank),
        LOCAL_RANK=str(env.local_rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_WORLD_SIZE=str(env.local_world_size),
    )
    count, pack = 0, quantize._pack

    def counted(weight: torch.Tensor, lora: Any) -> Any:
        nonlocal count
        if count == (dies_after or 0):
            (cache / f"seen-{env.rank}").touch()
        if count == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        while dies_after is None and len(list(cache.glob("seen-*"))) < env.world_size:
            time.sleep(0.01)  # until the other ranks have taken a layer, or have died
        count += 1
        return pack(weight, lora)

    quantize._pack = counted
    values = bits(build(config_for(base, lora={"quantize": "nf4"})))
    return count, values

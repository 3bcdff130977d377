"""Runs with variants of LoRA and quantized weights: every strategy that supports them trains to the
same losses, and a resumed run ends with the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, losses, report, run, train

pytestmark = [pytest.mark.slow, pytest.mark.soak]

ARGS = (
    "lora.enable=true",
    "lora.dropout=0",
    "train_args.learning_rate=1e-2",
    "train_args.lr_scheduler_type=constant",
)
#: name → (ranks, replicas, arguments)
MODES = {
    "ddp": (2, 2, ()),
    "zero1": (2, 2, ()),
    "zero2": (2, 2, ("gradient_checkpointing=true",)),
    "zero3": (2, 2, ()),
    "deepspeed": (2, 2, ("parallel.deepspeed_stage=3",)),
    "tensor": (2, 1, ()),
    "pipeline": (2, 1, ()),
}
SHARDED = ("ddp", "zero1", "zero2", "zero3")
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dora": (("lora.use_dora=true", "lora.use_rslora=true"), (*SHARDED, "pipeline")),
    "pissa": (("lora.init_lora_weights=pissa",), (*SHARDED, "deepspeed", "tensor", "pipeline")),
    "olora-plus": (
        ("lora.init_lora_weights=olora", "lora.loraplus_lr_ratio=4"),
        (*SHARDED, "deepspeed", "tensor", "pipeline"),
    ),
    "vera": (("lora.method=vera", "lora.rank=64"), SHARDED),
    "nf4": (("lora.quantize=nf4",), SHARDED),
    "nf4-loftq": (("lora.quantize=nf4", "lora.init_lora_weights=loftq"), ("ddp", "zero3")),
    "nf4-dora": (("lora.quantize=nf4", "lora.use_dora=true"), ("zero3",)),
    "int8": (("lora.quantize=int8",), ("ddp", "zero1")),
}


def mode_args(mode: str) -> list[str]:
    ranks, replicas, args = MODES.get(mode, (1, 1, ()))
    accumulation = f"gradient_accumulation_steps={2 // replicas}"
    return [f"parallel.mode={mode}", f"parallel.num_gpus={ranks}", accumulation, *args]


def require(variant: str) -> tuple[str, ...]:
    if variant.startswith(("nf4", "int8")):
        pytest.importorskip("bitsandbytes")
    return VARIANTS[variant][0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses of one rank, by variant."""
    results: dict[str, list[float]] = {}

    def measure(variant: str) -> list[float]:
        if variant not in results:
            folder = tmp_path_factory.mktemp(variant)
            train(folder, *ARGS, *require(variant), *mode_args("single"), "max_steps=4")
            results[variant] = losses(folder)
        return results[variant]

    return measure


@pytest.mark.parametrize(
    ("variant", "mode"),
    [(variant, mode) for variant, (_, modes) in VARIANTS.items() for mode in modes],
)
def test_strategies_agree(variant: str, mode: str, alone: Any, tmp_path: Path) -> None:
    train(tmp_path, *ARGS, *require(variant), *mode_args(mode), "max_steps=4")
    assert losses(tmp_path) == pytest.approx(alone(variant), rel=2e-4)
    state = report(tmp_path)["state_memory_bytes"]
    assert state["measured"] == pytest.approx(state["predicted"], rel=1e-3)


@pytest.mark.parametrize("variant", ["pissa", "nf4", "nf4-loftq", "dora"])
def test_resumed_run_ends_with_the_same_bits(variant: str, tmp_path: Path) -> None:
    args = [*ARGS, *require(variant)]
    train(tmp_path / "once", *args, *mode_args("single"), "max_steps=4")
    for mode, steps in (("zero3", 2), ("single", 4)):
        changed = ["--allow-config-change", f"max_steps={steps}"]
        train(tmp_path / "twice", *args, *mode_args(mode), *changed)
    first, second = (inspect(tmp_path / name) for name in ("once", "twice"))
    assert first["tensors"].keys() == second["tensors"].keys()
    assert losses(tmp_path / "twice") == pytest.approx(losses(tmp_path / "once"), rel=2e-4)
    again = tmp_path / "again"
    for steps in (2, 4):
        changed = ["--allow-config-change", f"max_steps={steps}"]
        train(again, *args, *mode_args("single"), *changed)
    assert inspect(again)["digest"] == first["digest"]


def inspect(folder: Path) -> dict[str, Any]:
    path = str(folder / "checkpoints" / "step-00000004")
    content: dict[str, Any] = json.loads(run(path, "--json", verb="inspect").stdout)
    return content


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    refused = [*ARGS, *mode_args("tensor"), "lora.quantize=nf4", f"output_dir={folder}"]
    message = run(*MICRO, *refused, expect=2).stderr
    assert "`lora.quantize: nf4` is not supported with `parallel.mode: tensor`" in message
    assert not folder.exists()

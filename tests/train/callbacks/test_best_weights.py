"""The weights of the best evaluation with strategies that divide the model, on real models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MICRO, events, report, run
from safetensors.torch import load_file

from paceline.checkpoint.format import name_of
from paceline.checkpoint.reader import CheckpointReader

pytestmark = [pytest.mark.slow, pytest.mark.soak]

MODES = {
    "tensor": ("parallel.mode=tensor", "parallel.num_gpus=2"),
    "pipeline": ("parallel.mode=pipeline", "parallel.num_gpus=2", "gradient_accumulation_steps=2"),
    "shard-tensor": ("parallel.shard=2", "parallel.tensor=2", "parallel.num_gpus=4"),
    "tensor-pipeline": (
        "parallel.tensor=2",
        "parallel.pipeline=2",
        "parallel.num_gpus=4",
        "gradient_accumulation_steps=2",
    ),
    "deepspeed-2": ("parallel.mode=deepspeed", "parallel.deepspeed_stage=2", "parallel.num_gpus=2"),
    "deepspeed-3": ("parallel.mode=deepspeed", "parallel.deepspeed_stage=3", "parallel.num_gpus=2"),
}
#: With such a learning rate the loss rises soon.
ARGS = (
    "eval_steps=1",
    "max_steps=12",
    "save_total_limit=1",
    "learning_rate=0.3",
    "lr_scheduler_type=constant",
    "load_best_model_at_end=true",
    "train_args.early_stopping.patience=1",
    "evaluation.num_samples=0",
)


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(checkpoint) as reader:
        return {
            name.removeprefix("model/"): reader.read(name, [0] * len(shape), shape)
            for name, (_, shape) in reader.tensors().items()
            if name.startswith("model/")
        }


def check(folder: Path) -> dict[str, Any]:
    """Check that the run ended early, and return the record of its best evaluation."""
    losses = {event["step"]: event["loss"] for event in events(folder, "eval")}
    result = report(folder)
    best = result["best"]
    assert best["is_final"]
    assert best["value"] == min(losses.values()) == losses[best["step"]]
    assert result["steps"] == best["step"] + 1 < 12
    assert result["stop_reason"].startswith("early stopping: loss has not improved")
    names = {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()}
    assert {name_of(best["step"]), name_of(result["steps"])} <= names
    return best


@pytest.mark.parametrize("mode", MODES)
def test_model_has_the_best_weights(mode: str, tmp_path: Path) -> None:
    run(*MICRO, "split_dataset_ratio=0.1", f"output_dir={tmp_path}", *MODES[mode], *ARGS)
    best = check(tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    expected = weights_in(tmp_path / "checkpoints" / name_of(best["step"]))
    assert saved.keys() <= expected.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, expected[name]), name
    again = run(*MICRO, "split_dataset_ratio=0.1", f"output_dir={tmp_path}", *MODES[mode], *ARGS)
    assert "run already finished" in again.stderr


def test_model_of_a_parameter_server_has_the_best_weights(tmp_path: Path) -> None:
    run(
        "model=builtin:dlrm", "task=recommend", "dataset=builtin:clicks#3000",
        "parallel.device=cpu", "parallel.mode=parameter_server", "parallel.num_gpus=3",
        "split_dataset_ratio=0.2", "per_device_train_batch_size=32", "recommend.embedding_dim=4",
        f"output_dir={tmp_path}", *ARGS,
    )  # fmt: skip
    best = check(tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    expected = weights_in(tmp_path / "checkpoints" / name_of(best["step"]))
    common = saved.keys() & expected.keys()
    assert common
    for name in common:
        assert torch.equal(saved[name], expected[name]), name

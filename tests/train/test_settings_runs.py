"""Runs with the settings of the optimizer and the loss: exact resume, and the trained model."""

from pathlib import Path

import pytest
import torch
from commands import digest, losses, train
from safetensors.torch import load_file

SETTINGS = (
    "neftune_noise_alpha=5",
    "label_smoothing_factor=0.1",
    "ema_decay=0.9",
    "train_args.freeze=['layers.0.self_attn']",
    "train_args.parameter_groups=[{params: [embed], learning_rate: 1e-4}]",
    "parallel.num_gpus=2",
    "save_steps=3",
    "max_steps=6",
    "eval_steps=2",
    "split_dataset_ratio=0.1",
    "evaluation.num_samples=0",
)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_resumed_run_has_the_same_bits(mode: str, tmp_path: Path) -> None:
    train(tmp_path / "a", *SETTINGS, f"parallel.mode={mode}")
    middle = tmp_path / "a" / "checkpoints" / "step-00000003"
    train(tmp_path / "b", *SETTINGS, f"parallel.mode={mode}", f"resume={middle}")
    name = "checkpoints/step-00000006"
    assert digest(tmp_path / "a" / name) == digest(tmp_path / "b" / name)
    other = "zero1" if mode == "ddp" else "ddp"
    train(tmp_path / "c", *SETTINGS, f"parallel.mode={other}", f"resume={middle}")
    assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a")[3:], rel=1e-5)


def state_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "checkpoints" / f"step-0000000{step}").glob("state-*")))


@pytest.mark.soak
def test_trained_model_is_the_average(tmp_path: Path) -> None:
    args = ("save_steps=1", "save_total_limit=null", "max_steps=3", "parallel.num_gpus=1")
    train(tmp_path / "a", *args, "ema_decay=0.5")
    train(tmp_path / "b", *args)
    averaged, plain = state_at(tmp_path / "a", 3), [state_at(tmp_path / "b", n) for n in (1, 2, 3)]
    trained = load_file(tmp_path / "a" / "model" / "model.safetensors")
    for key in [key for key in averaged if key.startswith("model/")]:
        name = key.removeprefix("model/")
        assert torch.equal(averaged[f"optimizer/{name}/train_weights"], plain[2][key])
        assert torch.equal(averaged[key], trained[name])
        first, second, third = (state[key].double() for state in plain)
        # average = initial / 8 + first / 8 + second / 4 + third / 2; a step changes little
        initial = 8 * (averaged[key].double() - first / 8 - second / 4 - third / 2)
        assert float((initial - first).abs().max()) < 0.01

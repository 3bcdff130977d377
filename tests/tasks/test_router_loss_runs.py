"""Runs with the auxiliary loss of a mixture: the number of ranks, the accumulation and the packing
do not change it."""

import json
from pathlib import Path

import pytest
from adapter_families import make_family
from commands import losses, run

from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer


def settings(folder: Path, coefficient: float = 0.5) -> list[str]:
    base = make_family("mixtral", folder / "base")
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    return [
        f"model={base}",
        "dataset=builtin:python-docs#64",
        "parallel.device=cpu",
        "train_args.precision=32",
        "train_args.max_length=64",
        f"train_args.router_aux_loss_coef={coefficient}",
        "learning_rate=0.01",
        "logging_steps=1",
        "max_steps=3",
    ]


@pytest.mark.soak
def test_strategies_agree_on_the_auxiliary_loss(tmp_path: Path) -> None:
    modes = "ddp,zero1,zero2,zero3"
    args = [*settings(tmp_path), f"output_dir={tmp_path / 'verify'}", "--world-size", "2"]
    args += ["per_device_train_batch_size=2", "train_args.gradient_accumulation_steps=2"]
    result = json.loads(run(*args, "--modes", modes, "--json", verb="verify").stdout)
    assert result["ok"], result
    assert all(mode["loss_rel_diff"] < 1e-6 for mode in result["modes"])


@pytest.mark.soak
def test_ranks_accumulation_and_packing_do_not_change_the_loss(tmp_path: Path) -> None:
    args = settings(tmp_path)
    layouts = {
        "single": ["parallel.mode=single", "per_device_train_batch_size=8"],
        "accumulated": [
            "parallel.mode=single",
            "per_device_train_batch_size=2",
            "train_args.gradient_accumulation_steps=4",
        ],
        "padded": [
            "parallel.mode=single",
            "per_device_train_batch_size=8",
            "train_args.packing=false",
        ],
        "ranks": [
            "parallel.mode=zero2",
            "parallel.num_gpus=4",
            "per_device_train_batch_size=2",
        ],
    }
    seen = {}
    for name, layout in layouts.items():
        run(*args, *layout, f"output_dir={tmp_path / name}", verb="train")
        seen[name] = losses(tmp_path / name)
    plain = [*settings(tmp_path, 0.0), *layouts["single"], f"output_dir={tmp_path / 'plain'}"]
    run(*plain, verb="train")
    for name in layouts:
        assert seen[name] == pytest.approx(seen["single"], rel=1e-6), name
    # The auxiliary loss of two experts per token is 2 if all experts are used evenly.
    assert seen["single"][0] - losses(tmp_path / "plain")[0] == pytest.approx(1.0, abs=0.1)

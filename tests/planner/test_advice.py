"""What makes a configured mode fit."""

from typing import Any

import pytest

import paceline
from paceline.cli import main

GIB = 2**30
#: The file of a first user: four cards of 24 GB.
QWEN: dict[str, Any] = {
    "model": "qwen/Qwen-7B",
    "task": "sft",
    "dataset": "alpaca-en",
    "parallel": {"mode": "ddp", "num_gpus": 4},
    "lora": {"enable": True, "rank": 64},
}


def plan(device: str = "A10", **changes: Any) -> dict[str, Any]:
    """The plan of the file with some keys changed, by their dotted names."""
    keys: dict[str, Any] = {**QWEN, "parallel": dict(QWEN["parallel"]), "train_args": {}}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        keys[section][key] = value
    return paceline.plan(keys, world_size=4, device=device)


def by_mode(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(mode for mode in result["modes"] if mode["mode"] == name)


@pytest.mark.soak
def test_the_smallest_change_that_fits_is_found() -> None:
    result = plan()
    assert result["precision"] == "bf16-mixed"
    assert by_mode(result, "ddp")["fits"] is False
    named = [tuple(change["settings"]) for change in result["changes"]]
    assert ("train_args.gradient_checkpointing",) in named
    assert ("parallel.mode",) in named
    smallest = result["smallest_change"]
    assert smallest["fits"] is True
    assert smallest["memory_bytes"] <= 0.9 * 24e9
    assert smallest["memory_bytes_of_all_ranks"] == 4 * smallest["memory_bytes"]
    assert not any(change["fits"] for change in result["changes"])  # so that it takes more than one

    # The prediction is that of the plan of the changed config, and so is every other.
    changed = plan(**smallest["settings"])
    mode = by_mode(changed, smallest["mode"])
    assert (mode["fits"], mode["memory_bytes"]["total"]) == (True, smallest["memory_bytes"])
    assert mode["step_time_s"] == pytest.approx(smallest["step_time_s"])
    assert changed["changes"] is None
    for change in result["changes"]:
        alone = by_mode(plan(**change["settings"]), change["mode"])
        assert (alone["memory_bytes"]["total"], alone["fits"]) == (
            change["memory_bytes"],
            change["fits"],
        )


@pytest.mark.soak
def test_a_precision_counts_with_the_frozen_weights() -> None:
    keys = {"train_args.precision": "32", "train_args.gradient_checkpointing": True}
    sized = plan(device="RTX-5090", **{**keys, "train_args.per_device_train_batch_size": 1})
    assert by_mode(sized, "ddp")["fits"] is False
    assert list(sized["smallest_change"]["settings"]) in (
        ["train_args.precision"],
        ["parallel.mode"],
    )
    change = next(
        change for change in sized["changes"] if "train_args.precision" in change["settings"]
    )
    assert change["settings"] == {"train_args.precision": "bf16-mixed"}
    # 7.7 billion frozen weights in 2 bytes instead of 4
    assert by_mode(sized, "ddp")["memory_bytes"]["total"] - change["memory_bytes"] > 14 * GIB
    without = plan(device="V100-32GB", **keys)
    assert {"train_args.precision": "fp16-mixed"} in [
        change["settings"] for change in without["changes"]
    ]
    assert plan(device="V100-32GB")["precision"] == "fp16-mixed"


@pytest.mark.soak
def test_the_page_says_what_fits_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "plan",
        "model=qwen/Qwen-7B",
        "dataset=alpaca-en",
        "lora.enable=true",
        "lora.rank=64",
        "parallel.mode=ddp",
    ]
    assert main([*args, "--device", "A10", "--world-size", "4"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "as configured: ddp does not fit: " in page
    assert " GiB on 4 ranks; 20.1 GiB per rank can be used" in page
    assert "with parallel.mode=zero3: " in page
    assert (
        "the smallest change that fits: per_device_train_batch_size=1 gradient_accumulation_steps=4"
        in page
    )
    assert (
        "cost: 4 micro-batches per step; the same global batch and loss; activations are"
        " recomputed" in page
    )
    assert "per step instead of" in page
    assert main([*args, "--device", "H200", "--world-size", "4"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "as configured: ddp fits: " in page
    assert "the smallest change" not in page
    assert main([*args, "--device", "T4", "--world-size", "1"]) == 0
    assert "these changes together do not make it fit" in " ".join(capsys.readouterr().out.split())

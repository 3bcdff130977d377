"""Test the changes that `paceline plan` suggests so that the configured mode fits."""

from typing import Any

import pytest

import paceline
from paceline.cli import main

GIB = 2**30
#: A typical config for four GPUs with 24 GB each.
QWEN: dict[str, Any] = {
    "model": "qwen/Qwen-7B",
    "task": "sft",
    "dataset": "alpaca-en",
    "parallel": {"mode": "ddp", "num_gpus": 4},
    "lora": {"enable": True, "rank": 64},
}


def plan(device: str = "A10", **changes: Any) -> dict[str, Any]:
    """Return the plan of the config with changed keys, given by their dotted names."""
    keys: dict[str, Any] = {**QWEN, "parallel": dict(QWEN["parallel"]), "train_args": {}}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        keys[section][key] = value
    return paceline.plan(keys, world_size=4, device=device)


def by_mode(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(mode for mode in result["modes"] if mode["mode"] == name)


@pytest.mark.soak
def test_finds_the_smallest_change_that_fits() -> None:
    result = plan()
    assert result["precision"] == "bf16-mixed"
    assert by_mode(result, "ddp")["fits"] is False
    suggested = [tuple(change["settings"]) for change in result["changes"]]
    assert ("train_args.gradient_checkpointing",) in suggested
    assert ("parallel.mode",) in suggested
    smallest = result["smallest_change"]
    assert smallest["fits"] is True
    assert smallest["memory_bytes"] <= 0.9 * 24e9
    assert smallest["memory_bytes_of_all_ranks"] == 4 * smallest["memory_bytes"]
    # One change suffices, so several together are not suggested.
    assert smallest["settings"] in [
        change["settings"] for change in result["changes"] if change["fits"]
    ]

    # Each prediction equals that of the plan of the changed config.
    changed = plan(**smallest["settings"])
    mode = by_mode(changed, smallest["mode"])
    assert (mode["fits"], mode["memory_bytes"]["total"]) == (True, smallest["memory_bytes"])
    assert mode["step_time_s"] == pytest.approx(smallest["step_time_s"])
    assert changed["changes"] is None
    for change in result["changes"]:
        changed_mode = by_mode(plan(**change["settings"]), change["mode"])
        assert (changed_mode["memory_bytes"]["total"], changed_mode["fits"]) == (
            change["memory_bytes"],
            change["fits"],
        )


@pytest.mark.soak
def test_lower_precision_shrinks_the_frozen_weights() -> None:
    keys = {"train_args.precision": "32", "train_args.gradient_checkpointing": "full"}
    result = plan(device="RTX-5090", **{**keys, "train_args.per_device_train_batch_size": 1})
    assert by_mode(result, "ddp")["fits"] is False
    assert list(result["smallest_change"]["settings"]) in (
        ["train_args.precision"],
        ["parallel.mode"],
    )
    change = next(
        change for change in result["changes"] if "train_args.precision" in change["settings"]
    )
    assert change["settings"] == {"train_args.precision": "bf16-mixed"}
    # 7.7 billion frozen weights in 2 bytes instead of 4
    assert by_mode(result, "ddp")["memory_bytes"]["total"] - change["memory_bytes"] > 14 * GIB
    without_bfloat16 = plan(device="V100-32GB", **keys)
    assert {"train_args.precision": "fp16-mixed"} in [
        change["settings"] for change in without_bfloat16["changes"]
    ]
    assert plan(device="V100-32GB")["precision"] == "fp16-mixed"


@pytest.mark.soak
def test_output_lists_what_fits_and_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "plan",
        "model=qwen/Qwen-7B",
        "dataset=alpaca-en",
        "lora.enable=true",
        "lora.rank=64",
        "parallel.mode=ddp",
    ]
    assert main([*args, "--device", "A10", "--world-size", "4"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "as configured: ddp does not fit: " in output
    assert "`paceline sft` chooses gradient_checkpointing=selective" in output
    assert "the smallest change" not in output
    # With memory settings that are set, nothing is chosen.
    args += [
        "per_device_train_batch_size=4",
        "gradient_accumulation_steps=1",
        "gradient_checkpointing=none",
        "parallel.cpu_offload=none",
    ]
    assert main([*args, "--device", "A10", "--world-size", "4"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "as configured: ddp does not fit: " in output
    assert " GiB on 4 ranks; 20.1 GiB per rank can be used" in output
    assert "with parallel.mode=zero3: " in output
    assert "with gradient_checkpointing=full: 19.2 GiB per rank" in output
    assert "the smallest change that fits: parallel.cpu_offload=activations" in output
    cost = "activations are copied to the host and back in each micro-batch; the same loss"
    assert f"cost: {cost}" in output
    assert "per step instead of" in output
    assert main([*args, "--device", "H200", "--world-size", "4"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "as configured: ddp fits: " in output
    assert "the smallest change" not in output
    assert main([*args, "--device", "T4", "--world-size", "1"]) == 0
    assert "these changes together do not make it fit" in " ".join(capsys.readouterr().out.split())


@pytest.mark.soak
def test_qlora_of_a_7b_model_fits_in_12_gb() -> None:
    pytest.importorskip("bitsandbytes")
    args = {
        "train_args.per_device_train_batch_size": 1,
        "train_args.gradient_checkpointing": True,
        "train_args.max_length": 1024,
    }
    totals = {}
    for quantize in ("none", "nf4"):
        lora = {"enable": True, "rank": 64, "quantize": quantize}
        result = paceline.plan({**QWEN, "lora": lora, **args}, world_size=4, device="A10")
        totals[quantize] = by_mode(result, "ddp")["memory_bytes"]["total"]
        assert result["parameters"] == pytest.approx(7.88e9, rel=1e-3)
    assert totals["nf4"] < 12e9 < totals["none"]

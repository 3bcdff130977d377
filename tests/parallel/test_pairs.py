"""The support tables: each strategy is run with each option on two ranks, and each pair of axes on
four ranks, and compared with the declared capabilities."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run
from families import make_model

from paceline.parallel import support_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
MODES = [
    "single", "dp", "ddp", "zero1", "zero2", "zero3", "deepspeed-1", "deepspeed-2", "deepspeed-3",
    "tensor", "pipeline", "context",
]  # fmt: skip
MICRO: dict[str, Any] = {
    "model": "builtin:qwen2-micro",
    "dataset": "builtin:python-docs#64",
    "train_args": {
        "max_length": 96,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
    },
}
#: Column → the settings that it adds to MICRO, or a complete config.
OPTIONS: dict[str, dict[str, Any]] = {
    "full, packed": {},
    "LoRA": {"lora": {"enable": True, "rank": 4}},
    "bf16": {"train_args": {"precision": "bf16-mixed"}},
    "fp16": {"train_args": {"precision": "fp16-mixed"}},
    "recompute": {"train_args": {"gradient_checkpointing": "full"}},
    "padded": {"train_args": {"packing": False}},
    "LoRA, bf16, recompute": {
        "lora": {"enable": True},
        "train_args": {"precision": "bf16-mixed", "gradient_checkpointing": "full"},
    },
    "`adafactor`": {"train_args": {"optim": "adafactor"}},
    "`muon`": {"train_args": {"optim": "muon"}},
    "`lion`": {"train_args": {"optim": "lion"}},
    "8-bit": {"train_args": {"optim": "adamw_8bit"}},
    "8-bit, torchao": {"train_args": {"optim": "adamw_torchao_8bit"}},
    "`schedule_free_adamw`": {"train_args": {"optim": "schedule_free_adamw"}},
    "`classify`": {
        "model": "builtin:mlp",
        "task": "classify",
        "dataset": "builtin:digits",
        "train_args": {"per_device_train_batch_size": 16},
    },
}


def run_modes(option: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Return mode → (cell of the table, reason) from three steps of training with each strategy."""
    extra = OPTIONS[option]
    arguments = {
        **(MICRO["train_args"] if "model" not in extra else {}),
        **extra.get("train_args", {}),
    }
    config = {**MICRO, **extra, "train_args": arguments, "parallel": {"device": "cpu"}}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    process = run(
        str(file), "--world-size", "2", "--steps", "3", "--json", verb="verify", timeout_s=400.0
    )
    rows = {row["mode"]: row for row in json.loads(process.stdout)["modes"]}
    cells = {}
    for mode in MODES:
        row = rows.get(mode) or rows[mode.removesuffix("-2")]  # the config sets stage 2
        assert row["ok"] is not False, f"{mode} with {option}: {row}"
        cells[mode] = ("yes", "") if row["ok"] else ("–", row["reason"])
    return cells


def run_axes(
    names: list[str], folder: Path, num_ranks: int = 4, **changes: str | dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Return the results of three steps of training with products of axes.

    Args:
        names: names of the modes of ``paceline verify``.
        changes: keys in which the config differs from MICRO.
    """
    file = folder / "config.yaml"
    content = yaml.safe_dump({**MICRO, **changes, "parallel": {"device": "cpu"}})
    file.write_text(content, encoding="utf-8")
    args = [str(file), "--world-size", str(num_ranks), "--steps", "3", "--json"]
    process = run(*args, "--modes", ",".join(names), verb="verify", timeout_s=600.0)
    return {row["mode"]: row for row in json.loads(process.stdout)["modes"]}


def test_table_in_the_docs_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert support_table.updated(page) == page


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("option", OPTIONS)
def test_table_matches_three_steps_of_training(option: str, tmp_path: Path) -> None:
    settings = {
        key: OPTIONS[option][key] for key in OPTIONS[option] if key in ("lora", "train_args")
    }
    expected = {
        name: support_table.reason_against(mode, dims, parallel, settings)
        for name, mode, dims, parallel in support_table.rows()
        if name in MODES
    }
    for mode, (cell, reason) in run_modes(option, tmp_path).items():
        assert (cell == "yes") == (expected[mode] is None), f"{mode} with {option}: {reason}"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
def test_axes_match_three_steps_of_training(has_experts: bool, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    sizes = [
        support_table.pair_sizes(*pair)
        for pair in combinations(support_table.AXES, 2)
        if ("expert" in pair) == has_experts
    ]
    expected = {
        "-".join(f"{axis}{size}" for axis, size in each.items()): (
            support_table.reason_against_axes(each)
        )
        for each in sizes
    }
    names = [name for name, reason in expected.items() if reason is None]
    refused = {name: reason for name, reason in expected.items() if reason is not None}
    model = {"model": str(make_model("mixtral", tmp_path))} if has_experts else {}
    rows = run_axes(names, tmp_path, **model)
    assert {name: rows[name]["ok"] for name in names} == dict.fromkeys(names, True), rows
    for name, reason in refused.items():
        file = str(tmp_path / "config.yaml")
        args = (file, "--world-size", "4", "--modes", name)
        process = run(*args, verb="verify", expect=2, timeout_s=100.0)
        assert reason in " ".join(process.stderr.split())
        assert f"- {reason}." in page


@pytest.mark.slow
@pytest.mark.soak
def test_three_axes_match_three_steps_of_training(tmp_path: Path) -> None:
    axes = [axis for axis in support_table.AXES if axis != "expert"]
    names = ["-".join(f"{axis}2" for axis in each) for each in combinations(axes, 3)]
    rows = run_axes(names, tmp_path, num_ranks=8)
    assert {name: rows[name]["ok"] for name in names} == dict.fromkeys(names, True), rows

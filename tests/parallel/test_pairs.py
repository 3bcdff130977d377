"""What works with what: each strategy with each switch on two ranks, tried; the table in
docs/strategies.md is what came of it.

To write the table anew: PACELINE_WRITE_TABLE=1 make soak.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- pairs: begin -->\n", "<!-- pairs: end -->"
MODES = [
    "single", "dp", "ddp", "zero1", "zero2", "zero3", "deepspeed-1", "deepspeed-2", "deepspeed-3",
    "tensor", "pipeline",
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
#: column → what it adds to MICRO, or a whole config
SWITCHES: dict[str, dict[str, Any]] = {
    "full, packed": {},
    "LoRA": {"lora": {"enable": True, "rank": 4}},
    "bf16": {"train_args": {"precision": "bf16-mixed"}},
    "fp16": {"train_args": {"precision": "fp16-mixed"}},
    "recompute": {"train_args": {"gradient_checkpointing": True}},
    "padded": {"train_args": {"packing": False}},
    "LoRA, bf16, recompute": {
        "lora": {"enable": True},
        "train_args": {"precision": "bf16-mixed", "gradient_checkpointing": True},
    },
    "`adafactor`": {"train_args": {"optim": "adafactor"}},
    "`classify`": {
        "model": "builtin:mlp",
        "task": "classify",
        "dataset": "builtin:digits",
        "train_args": {"per_device_train_batch_size": 16},
    },
}


def tried(switch: str, folder: Path) -> dict[str, tuple[str, str]]:
    """mode → (cell of the table, reason), from the strategies' own training of three steps."""
    given = SWITCHES[switch]
    arguments = {
        **(MICRO["train_args"] if "model" not in given else {}),
        **given.get("train_args", {}),
    }
    config = {**MICRO, **given, "train_args": arguments, "parallel": {"device": "cpu"}}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    done = run(
        str(file), "--world-size", "2", "--steps", "3", "--json", verb="verify", timeout_s=400.0
    )
    rows = {one["mode"]: one for one in json.loads(done.stdout)["modes"]}
    cells = {}
    for mode in MODES:
        row = rows.get(mode) or rows[mode.removesuffix("-2")]  # stage 2 is what the config asks for
        assert row["ok"] is not False, f"{mode} with {switch}: {row}"
        cells[mode] = ("yes", "") if row["ok"] else ("–", row["reason"])
    return cells


def table() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]


def column(switch: str) -> dict[str, str]:
    head, _, *rows = table()
    place = head.index(switch)
    return {row[0].strip("`"): row[place] for row in rows}


def test_the_table_has_a_column_for_each_switch_and_a_row_for_each_mode() -> None:
    head, _, *rows = table()
    assert head[1:] == list(SWITCHES)
    assert [row[0].strip("`") for row in rows] == list(MODES)


@pytest.mark.slow
@pytest.mark.soak
def test_the_whole_table(tmp_path: Path) -> None:
    found = {switch: tried(switch, tmp_path) for switch in SWITCHES}
    if "PACELINE_WRITE_TABLE" in os.environ:
        write(found)
    for switch in SWITCHES:
        assert column(switch) == {mode: cell for mode, (cell, _) in found[switch].items()}


def write(found: dict[str, dict[str, tuple[str, str]]]) -> None:
    rows = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    rows += [
        f"| `{mode}` | " + " | ".join(found[switch][mode][0] for switch in found) + " |"
        for mode in MODES
    ]
    reasons = {
        f"- `{mode}` with {switch}: {reason}"
        for switch in found
        for mode, (_, reason) in found[switch].items()
        if reason
    }
    text = PAGE.read_text(encoding="utf-8")
    body = (
        "\n".join(rows)
        + "\n\nThe reasons, as they are printed:\n\n"
        + "\n".join(sorted(reasons))
        + "\n\n"
    )
    PAGE.write_text(
        text[: text.index(BEGIN) + len(BEGIN)] + body + text[text.index(END) :], encoding="utf-8"
    )

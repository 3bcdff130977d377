"""Models with recurrent and convolution layers train packed rows to the same losses with every
strategy, and as padded rows."""

from pathlib import Path

import pytest
from families import train_families

FAMILIES = [
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mamba2", "bamba", "jamba"),
    *("falcon_h1", "nemotron_h", "lfm2", "zamba2"),
]


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_modes_agree_on_packed_rows(tmp_path: Path, checkpointing: str) -> None:
    families = FAMILIES if checkpointing == "none" else ["qwen3_next", "lfm2", "bamba", "mamba2"]
    modes = ["ddp", "zero2", "zero3"]
    arguments = {"gradient_checkpointing": checkpointing}
    results = train_families(families, modes, tmp_path, train_args=arguments)
    expected = dict.fromkeys(["single", *modes], "ok") | {"packed": "packed"}
    assert results == dict.fromkeys(families, expected)

"""Training with weights in bfloat16 agrees between strategies, in losses, weights and predicted
memory."""

from pathlib import Path

import pytest
from families import train_families

MODES = ["ddp", "zero1", "zero2", "zero3", "tensor", "pipeline"]


@pytest.mark.soak
def test_modes_agree_on_weights_in_bfloat16(tmp_path: Path) -> None:
    families = ["llama", "gemma2"]
    arguments = {"precision": "bf16-true", "loss_chunk_size": 16}
    results = train_families(families, MODES, tmp_path, train_args=arguments)
    expected = dict.fromkeys(["single", *MODES], "ok") | {"packed": "packed"}
    assert results == dict.fromkeys(families, expected)

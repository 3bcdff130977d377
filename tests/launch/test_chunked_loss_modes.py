"""The loss in chunks is the same with every strategy, also where the head is split, sharded or only
on the last stage of a pipeline."""

from pathlib import Path

import pytest
from families import train_families

ALL = ["ddp", "zero1", "zero2", "zero3", "tensor", "pipeline"]


@pytest.mark.parametrize(
    ("families", "modes", "settings"),
    [
        pytest.param(["llama"], ["zero3", "tensor", "pipeline"], {}, marks=pytest.mark.slow),
        *(
            # Llama has an untied head, Gemma 2 a tied one and a soft cap, Phi a bias.
            pytest.param(["llama", "gemma2", "phi"], ALL, settings, marks=pytest.mark.soak)
            for settings in (
                {},
                {"precision": "bf16-mixed"},
                {"gradient_accumulation_steps": 2},
            )
        ),
    ],
)
def test_modes_agree_on_a_loss_in_chunks(
    families: list[str], modes: list[str], settings: dict[str, object], tmp_path: Path
) -> None:
    arguments = {"loss_chunk_size": 16, **settings}
    results = train_families(families, modes, tmp_path, train_args=arguments)
    expected = dict.fromkeys(["single", *modes], "ok") | {"packed": "packed"}
    assert results == dict.fromkeys(families, expected)

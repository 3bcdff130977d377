"""Hybrid and recurrent models with several ranks: every mode equals one rank, or says why not."""

from pathlib import Path

import pytest
from families import make_model, train_families

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.launch.passes.model import check_model
from paceline.parallel.registry import ParallelLayout

pytestmark = pytest.mark.slow

TEN = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "mamba2",
    "bamba",
    "jamba",
    "falcon_h1",
    "nemotron_h",
    "lfm2",
    "zamba2",
)
MODES = ["ddp", "zero2", "zero3", "pipeline"]
#: Families for which transformers or Paceline has a plan for splitting layers.
SPLIT = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "lfm2"}
PADDED = {"packing": False, "precision": "32"}


def check(results: dict[str, str], modes: list[str]) -> None:
    assert {mode: results[mode] for mode in modes} == dict.fromkeys(modes, "ok")


@pytest.mark.parametrize("name", TEN)
def test_modes_equal_one_rank(name: str, tmp_path: Path) -> None:
    modes = [*MODES, "tensor"]
    results = train_families([name], modes, tmp_path, steps=2, train_args=PADDED)[name]
    refused = set() if name in SPLIT else {"tensor"}
    refused |= {"pipeline"} if name == "zamba2" else set()
    check(results, [mode for mode in modes if mode not in refused])
    if "tensor" in refused:
        assert "has no plan for splitting" in results["tensor"]
    if "pipeline" in refused:
        assert "other than through the blocks before" in results["pipeline"]


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "nemotron_h", "lfm2", "zamba2"])
def test_lora_equals_one_rank(name: str, tmp_path: Path) -> None:
    settings = {"lora": {"enable": True, "rank": 4, "dropout": 0.0}, "train_args": PADDED}
    modes = [mode for mode in MODES if (name, mode) != ("zamba2", "pipeline")]
    check(train_families([name], modes, tmp_path, steps=2, **settings)[name], modes)


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        (
            "zamba2",
            ParallelLayout("pipeline", ParallelDims(pipeline=2), 2),
            "only the output of a block is sent to the next stage",
        ),
        (
            "zamba2",
            ParallelLayout("tensor", ParallelDims(tensor=2), 2),
            "no plan for splitting its layers",
        ),
        (
            "mamba2",
            ParallelLayout("tensor", ParallelDims(tensor=2), 2),
            "no plan for splitting its layers",
        ),
    ],
)
def test_refused_before_the_start(
    name: str, layout: ParallelLayout, reason: str, tmp_path: Path
) -> None:
    config = Config.model_validate(
        {
            "model": str(make_model(name, tmp_path)),
            "dataset": "builtin:python-docs#48",
            "train_args": {"max_length": 48},
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_model(config, layout)
    assert reason in str(caught.value)

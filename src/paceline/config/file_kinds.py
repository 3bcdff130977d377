"""Files of other tools that are not a config of a training run: named as what they are, with how to
use them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.compat.parallel.deepspeed_json import interpret, looks_like_deepspeed
from paceline.config.entries import Problem
from paceline.core.errors import ConfigError

_ACCELERATE = (
    "compute_environment", "distributed_type", "downcast_bf16", "main_training_function",
    "num_machines", "num_processes", "rdzv_backend", "same_network",
)  # fmt: skip


def is_accelerate(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a config of Accelerate: it says how processes start."""
    return "distributed_type" in tree or sum(key in tree for key in _ACCELERATE) >= 3


def check_kind(tree: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for a file that cannot be a config of a run, whatever the overrides are."""
    if looks_like_deepspeed(tree):
        stage = interpret(tree).stage
        kind = "a DeepSpeed config" + (f" (ZeRO stage {stage})" if stage is not None else "")
        raise ConfigError(
            f"{file} is {kind}, not a config of a run: it has no model and no dataset",
            fix=(
                f"name it in your config as `deepspeed: {file}`, or pass it beside the config: "
                f"`paceline sft CONFIG.yaml --deepspeed {file}`"
            ),
        )
    if any(
        "_component_" in str(key) or (isinstance(value, Mapping) and "_component_" in value)
        for key, value in tree.items()
    ):
        raise ConfigError(
            f"{file} is a config of torchtune (it has `_component_`), whose keys Paceline does not"
            " read",
            allowed=(
                "a config of Paceline, LLaMA-Factory, ms-swift, axolotl, TRL or alignment-handbook"
            ),
            fix=(
                "write a config with `model: FOLDER_OR_HUB_ID` and `dataset: ...` (docs/config.md),"
                " or use torchtune"
            ),
        )
    rest = [key for key in tree if not key.startswith(("_", "fsdp"))]
    if not rest and any(key.startswith("fsdp") for key in tree):
        raise ConfigError(
            f"{file} is an FSDP config, not a config of a run: it has no model and no dataset",
            fix=f"name it in your config as `fsdp: {file}`, or set `parallel.mode: zero3`",
        )


def accelerate_problem(file: Path, settings: Mapping[str, Any]) -> Problem:
    """The mistake in passing a config of Accelerate without a model and data.

    Args:
        settings: what its keys are read as, by dotted key of Paceline.
    """
    lines = "; ".join(f"`{key}: {value}`" for key, value in settings.items())
    return Problem(
        "this is a config of Accelerate: it says how processes start, and names no model and no"
        " dataset" + (f". It is read as {lines}" if lines else ""),
        fix=(
            f"pass the model and the dataset with it (`paceline sft {file} model=... dataset=...`),"
            " or copy its keys into your own config"
        ),
    )

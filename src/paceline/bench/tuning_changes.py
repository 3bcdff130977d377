"""The changes to a config that `paceline bench tuning` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.load import load_stored
from paceline.config.schema import Config
from paceline.config.yaml_read import YamlValue


@dataclass(frozen=True)
class TuningChange:
    """A change of one technique.

    Attributes:
        name: for display, such as ``precision: bf16-mixed``.
        technique: ``precision``, ``checkpointing``, ``prefetch``, ``compression``, ``packing``,
            ``accumulation`` or ``compile``.
        values: native key → value.
        turns_on: whether the change uses the technique; False if it stops using it.
        changes_result: what the change does to the trained weights; None if they stay the same up
            to the order of float32 sums.
    """

    name: str
    technique: str
    values: Mapping[str, YamlValue]
    turns_on: bool = True
    changes_result: str | None = None


def candidate_changes(
    config: Config, precision: str, num_ranks: int, num_cores: int, device_type: str
) -> list[TuningChange]:
    """Return the changes that are possible from this config.

    Args:
        precision: the precision of the run, never ``auto``.
        num_cores: cores of this host.
        device_type: type of the device that each rank trains on.
    """
    args = config.train_args
    changes = [
        _precision(precision),
        *_checkpointing(config),
        *_prefetch(config, num_ranks, num_cores, device_type),
    ]
    if num_ranks > 1 and config.parallel.mode in ("auto", "ddp"):
        changes += _compression(config)
    if config.task in ("sft", "pretrain") and args.packing_strategy == "micro_batch":
        is_packed = args.packing is not False
        changes.append(_switch("packing", "train_args.packing", not is_packed))
    changes += _accumulation(config)
    changes.append(_switch("compile", "train_args.torch_compile", not args.torch_compile))
    return changes


def _switch(technique: str, key: str, value: bool) -> TuningChange:
    name = f"{key.rpartition('.')[2]}: {str(value).lower()}"
    return TuningChange(name, technique, {key: value}, turns_on=value)


def _precision(precision: str) -> TuningChange:
    if precision == "32":
        return TuningChange(
            "precision: bf16-mixed",
            "precision",
            {"train_args.precision": "bf16-mixed"},
            changes_result="matrix products are rounded to bfloat16 (8 bits of precision)",
        )
    return TuningChange(
        "precision: 32",
        "precision",
        {"train_args.precision": "32"},
        turns_on=False,
        changes_result="matrix products are no longer rounded to 16 bits",
    )


def _checkpointing(config: Config) -> list[TuningChange]:
    key = "train_args.gradient_checkpointing"
    if config.train_args.recomputation != "none":
        return [TuningChange("gradient_checkpointing: none", "checkpointing", {key: "none"}, False)]
    return [
        TuningChange(f"gradient_checkpointing: {value}", "checkpointing", {key: value})
        for value in ("full", "selective")
    ]


def _prefetch(
    config: Config, num_ranks: int, num_cores: int, device_type: str
) -> list[TuningChange]:
    key = "train_args.dataloader_num_workers"
    if config.train_args.num_loader_processes(device_type) == 0:
        num_workers = 2 if num_cores >= 3 * num_ranks else 1
        return [
            TuningChange(f"dataloader_num_workers: {num_workers}", "prefetch", {key: num_workers})
        ]
    if config.streaming is True:
        return []  # streamed data needs a loader process
    return [TuningChange("dataloader_num_workers: 0", "prefetch", {key: 0}, turns_on=False)]


def _compression(config: Config) -> list[TuningChange]:
    if config.compression.chain:
        return [
            TuningChange(
                "compression.method: none",
                "compression",
                {"compression.method": "none"},
                turns_on=False,
                changes_result="gradients are no longer compressed",
            )
        ]
    losses = {
        "bf16": "gradients are rounded to bfloat16 before they are summed",
        "topk": "only the largest 1 % of the gradient's elements are sent in each step",
    }
    return [
        TuningChange(
            f"compression.method: {method}",
            "compression",
            {"compression.method": method},
            changes_result=loss,
        )
        for method, loss in losses.items()
    ]


def _accumulation(config: Config) -> list[TuningChange]:
    """Return changes of the micro-batch that keep the global batch."""
    args, changes = config.train_args, []
    size, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if args.packs_rows or args.auto_find_batch_size:
        return []
    if size % 2 == 0:
        changes.append((size // 2, count * 2))
    if count % 2 == 0:
        changes.append((size * 2, count // 2))
    return [
        TuningChange(
            f"micro-batches: {new_count} × {new_size}",
            "accumulation",
            {
                "train_args.per_device_train_batch_size": new_size,
                "train_args.gradient_accumulation_steps": new_count,
            },
            turns_on=new_count > count,
        )
        for new_size, new_count in changes
    ]


def with_values(config: Config, values: Mapping[str, YamlValue]) -> Config:
    """Return the config with these keys set.

    Raises:
        ConfigError: the values contradict the rest of the config.
    """
    stored: dict[str, Any] = config.model_dump(mode="json")
    for key, value in values.items():
        *sections, last = key.split(".")
        section = stored
        for name in sections:
            section = section[name]
        section[last] = value
    return load_stored(stored)

"""What is handed to DeepSpeed as its config. No torch here.

Which keys of a user's DeepSpeed JSON are honored is in
:mod:`paceline.config.compat.parallel.deepspeed_json`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from paceline.config.compat.parallel.deepspeed_json import (
    HONORED_ZERO,
    SHORT_NAMES,
    interpret,
    read_json,
)
from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError


def stage_of(parallel: Parallel) -> int:
    """The ZeRO stage of `mode: deepspeed`: `parallel.deepspeed_stage`, else the stage of the JSON,
    else 2."""
    if parallel.deepspeed_stage is not None:
        return parallel.deepspeed_stage
    stage = interpret(read_json(parallel.deepspeed_config)).stage
    return 2 if stage is None else stage


def check_json(config: Config, num_ranks: int) -> None:
    """Check every key of the user's DeepSpeed config.

    Raises:
        ConfigError: lists each key that cannot be honored, with the reason.
    """
    given = read_json(config.parallel.deepspeed_config)
    problems = list(interpret(given).problems)
    args = config.train_args
    batch, ours = (
        given.get("train_batch_size", "auto"),
        args.per_device_train_batch_size * args.gradient_accumulation_steps,
    )
    if batch not in ("auto", None, ours * num_ranks):
        problems.append(
            f"train_batch_size: {batch}; the config makes {ours * num_ranks}:"
            f" `train_args.per_device_train_batch_size: {args.per_device_train_batch_size}` ×"
            f" `train_args.gradient_accumulation_steps: {args.gradient_accumulation_steps}` ×"
            f" {num_ranks} ranks"
        )
    if (
        args.mixed_dtype == "float16"
        and isinstance(given.get("fp16"), Mapping)
        and given["fp16"].get("loss_scale", 0) not in (0, "auto")
    ):
        text = "fp16.loss_scale: a fixed loss scale; Paceline scales the loss dynamically (0)"
        problems += [] if text in problems else [text]
    if problems:
        raise cannot_honour("parallel.deepspeed_config", problems)


def cannot_honour(key: str, problems: list[str]) -> ConfigError:
    """The error for settings of a DeepSpeed JSON that cannot be honored."""
    return ConfigError(
        f"`{key}` has settings that cannot be honored:\n  " + "\n  ".join(problems),
        allowed='"auto" for what the config sets itself; in `zero_optimization`: '
        + ", ".join(HONORED_ZERO),
        fix="remove these settings, or set them as the lines above say",
    )


def zero_section(config: Config, trained_elements: int, low_bytes: int) -> dict[str, Any]:
    """`zero_optimization` for DeepSpeed: Paceline's own choices, then what the user's JSON says.

    The bucket is that of `parallel.bucket_cap_mb`, never more than all gradients (DeepSpeed's own
    default takes 5e8 elements whatever the model's size). At stage 3 every parameter is cut up and
    none kept after its use, as the ZeRO paper has it and as the declared cost counts it;
    DeepSpeed's defaults keep parameters of up to 1e5 elements whole on every rank, and all of them
    from forward to backward in models below 1e9."""
    parallel = config.parallel
    stage = stage_of(parallel)
    cap = int(parallel.bucket_cap_mb * 2**20) // (low_bytes or 4)
    section: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": max(2, min(cap, trained_elements)),
        "overlap_comm": False,
    }
    if stage == 3:
        section |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    if parallel.cpu_offload in ("optimizer", "all"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.cpu_offload == "all":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    theirs = read_json(parallel.deepspeed_config).get("zero_optimization") or {}
    for key, value in theirs.items():
        name = SHORT_NAMES.get(key, key)
        if name in HONORED_ZERO and value not in ("auto", None):
            section[name] = HONORED_ZERO[name](value)
    # A larger bucket changes nothing, and DeepSpeed allocates it in full.
    section["reduce_bucket_size"] = max(2, min(section["reduce_bucket_size"], trained_elements))
    return section


def engine_config(config: Config, trained_elements: int) -> dict[str, JsonValue]:
    """The whole config for ``deepspeed.initialize``."""
    args = config.train_args
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.mixed_dtype == "bfloat16"},
        # the loss comes scaled by Paceline
        "fp16": {"enabled": args.mixed_dtype == "float16", "loss_scale": 1.0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(config, trained_elements, 2 if args.mixed_dtype else 0),
    }

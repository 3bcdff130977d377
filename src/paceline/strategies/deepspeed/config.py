"""The config that Paceline passes to DeepSpeed. Imports no torch.

:mod:`paceline.config.compat.parallel.deepspeed_json` lists the keys of a user's DeepSpeed JSON that
are supported.
"""

from collections.abc import Mapping

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
    """Return the ZeRO stage of `mode: deepspeed`: `parallel.deepspeed_stage`, else the stage in the
    DeepSpeed JSON, else 2."""
    if parallel.deepspeed_stage is not None:
        return parallel.deepspeed_stage
    stage = interpret(read_json(parallel.deepspeed_config)).stage
    return 2 if stage is None else stage


def check_json(config: Config, num_ranks: int) -> None:
    """Check every key of the user's DeepSpeed config.

    Raises:
        ConfigError: lists each key that cannot be honored, with the reason.
    """
    content = read_json(config.parallel.deepspeed_config)
    problems = list(interpret(content).problems)
    args = config.train_args
    batch_size = content.get("train_batch_size", "auto")
    expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_ranks
    is_accumulation_set = "gradient_accumulation_steps" in args.model_fields_set
    if batch_size not in ("auto", None, expected) and (
        is_accumulation_set or args.global_batch_size != batch_size
    ):
        problems.append(
            f"train_batch_size: {batch_size}; the config makes {expected}:"
            f" `train_args.per_device_train_batch_size: {args.per_device_train_batch_size}` ×"
            f" `train_args.gradient_accumulation_steps: {args.gradient_accumulation_steps}` ×"
            f" {num_ranks} ranks"
        )
    if (
        args.mixed_dtype == "float16"
        and isinstance(fp16 := content.get("fp16"), Mapping)
        and fp16.get("loss_scale", 0) not in (0, "auto")
    ):
        text = "fp16.loss_scale: a fixed loss scale; Paceline scales the loss dynamically (0)"
        problems += [] if text in problems else [text]
    if problems:
        raise ConfigError(
            (
                "`parallel.deepspeed_config` has settings that are not supported:\n  "
                + "\n  ".join(problems)
            ),
            code="deepspeed-settings-not-supported",
            allowed=(
                '"auto" for what the config sets; in `zero_optimization`: '
                + ", ".join(HONORED_ZERO)
            ),
            fix="remove these settings, or change them as the lines above say",
        )


def zero_section(config: Config, trained_elements: int, low_bytes: int) -> dict[str, int]:
    """Return `zero_optimization` for DeepSpeed: Paceline's choices, overridden by the user's JSON.

    The bucket has the size of `parallel.bucket_cap_mb`, at most the size of all gradients;
    DeepSpeed's default is 5e8 elements for any model. At stage 3 every parameter is sharded and
    freed after its use, as in the ZeRO paper and as the cost model counts it; DeepSpeed's defaults
    keep parameters of up to 1e5 elements in full on every rank, and all parameters of models below
    1e9 from forward to backward.
    """
    parallel = config.parallel
    stage = stage_of(parallel)
    cap = int(parallel.bucket_cap_mb * 2**20) // (low_bytes or 4)
    section: dict[str, int] = {
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
    theirs = read_json(parallel.deepspeed_config).get("zero_optimization")
    for key, value in theirs.items() if isinstance(theirs, Mapping) else ():
        name = SHORT_NAMES.get(key, key)
        if name in HONORED_ZERO and value not in ("auto", None):
            section[name] = HONORED_ZERO[name](value)
    # DeepSpeed allocates the bucket in full, so it is no larger than needed.
    section["reduce_bucket_size"] = max(2, min(section["reduce_bucket_size"], trained_elements))
    return section


def _offload_section(parallel: Parallel) -> dict[str, JsonValue]:
    section: dict[str, JsonValue] = {}
    if parallel.state_offload in ("optimizer", "all"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.state_offload == "all":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def engine_config(config: Config, trained_elements: int) -> dict[str, JsonValue]:
    """Return the config for ``deepspeed.initialize``."""
    args = config.train_args
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.mixed_dtype == "bfloat16"},
        # Paceline scales the loss
        "fp16": {"enabled": args.mixed_dtype == "float16", "loss_scale": 1.0},
        # Its timer waits for the device twice per step.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            **zero_section(config, trained_elements, 2 if args.mixed_dtype else 0),
            **_offload_section(config.parallel),
        },
    }

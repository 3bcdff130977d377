"""What is handed to DeepSpeed as its config, and which keys of a DeepSpeed JSON of the user's are honoured. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.schema import Config, Parallel
from paceline.core.errors import ConfigError, nearest

#: Keys of `zero_optimization` that are passed on as they are, with what they hold.
HONOURED_ZERO: dict[str, type] = {
    "allgather_bucket_size": int,
    "allgather_partitions": bool,
    "contiguous_gradients": bool,
    "ignore_unused_parameters": bool,
    "overlap_comm": bool,
    "reduce_bucket_size": int,
    "reduce_scatter": bool,
    "round_robin_gradients": bool,
    "stage3_max_live_parameters": int,
    "stage3_max_reuse_distance": int,
    "stage3_model_persistence_threshold": int,
    "stage3_param_persistence_threshold": int,
    "stage3_prefetch_bucket_size": int,
    "sub_group_size": int,
    "use_multi_rank_bucket_allreduce": bool,
}

#: Other keys that DeepSpeed knows, with the reason why Paceline does not take them.
_CHECKPOINT = "checkpoints are Paceline's own and load under every strategy"
_PRINTS = "what is shown and reported is Paceline's business"
_SUM = "gradients are summed and divided by the global count of the loss, nothing else is exact"
_DTYPES = "the types follow from `train_args.precision`"
_FEATURE = "Paceline does not drive this feature of DeepSpeed"
REFUSED: dict[str, str] = {
    "activation_checkpointing": "set `train_args.gradient_checkpointing`",
    "amp": _DTYPES,
    "checkpoint": _CHECKPOINT,
    "comms_logger": _PRINTS,
    "communication_data_type": _DTYPES,
    "comet": _PRINTS,
    "csv_monitor": _PRINTS,
    "data_types": _DTYPES,
    "dataloader_drop_last": "every sample comes once an epoch",
    "dump_state": _PRINTS,
    "flops_profiler": _PRINTS,
    "gradient_allreduce_op": _SUM,
    "gradient_predivide_factor": _SUM,
    "memory_breakdown": _PRINTS,
    "prescale_gradients": _SUM,
    "scheduler": "set `train_args.lr_scheduler_type`, `train_args.warmup_ratio` and `train_args.lr_scheduler_kwargs`",
    "steps_per_print": "set `train_args.logging_steps`",
    "tensorboard": "set `report_to: [tensorboard]`",
    "torch_autocast": _DTYPES,
    "wall_clock_breakdown": _PRINTS,
    "wandb": _PRINTS,
    **dict.fromkeys(
        (
            "aio", "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency",
            "disable_allgather",
            "eigenvalue", "elasticity", "expert_parallel", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop",
            "quantize_training", "sparse_attention", "sparse_gradients", "tensor_parallel", "timers", "weight_quantization",
        ),
        _FEATURE,
    ),
}  # fmt: skip
_OPTIMIZER_PARAMS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "lr": ("train_args.learning_rate", lambda args: args.learning_rate),
    "betas": ("train_args.adam_beta1` and `train_args.adam_beta2", lambda args: [args.adam_beta1, args.adam_beta2]),
    "eps": ("train_args.adam_epsilon", lambda args: args.adam_epsilon),
    "weight_decay": ("train_args.weight_decay", lambda args: args.weight_decay),
    "momentum": ("train_args.momentum", lambda args: args.momentum),
}


def given_json(parallel: Parallel) -> dict[str, Any]:
    """The user's DeepSpeed config as a mapping; empty where there is none.

    Raises:
        ConfigError: the file cannot be read or is no JSON object.
    """
    given = parallel.deepspeed_config
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    try:
        found = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`parallel.deepspeed_config: {given}` cannot be read: {error}", allowed="a JSON file, or the mapping itself"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"`parallel.deepspeed_config: {given}` holds a {type(found).__name__}", allowed="a JSON object")
    return found


def check_json(config: Config, num_ranks: int) -> None:
    """Look at every key of the user's DeepSpeed config.

    Raises:
        ConfigError: lists each key that is not honoured, with the reason.
    """
    given = given_json(config.parallel)
    problems = [text for key, value in given.items() for text in _key_problems(key, value, config, num_ranks)]
    if problems:
        raise ConfigError(
            "`parallel.deepspeed_config` has what cannot be honoured:\n  " + "\n  ".join(problems),
            allowed='"auto" for what the config says itself; in `zero_optimization`: ' + ", ".join(HONOURED_ZERO),
            fix="take these keys out, or set them as said",
        )


def _key_problems(key: str, value: Any, config: Config, num_ranks: int) -> list[str]:
    args = config.train_args
    owned: dict[str, tuple[str, object]] = {
        "train_batch_size": (
            "train_args.per_device_train_batch_size` and `train_args.gradient_accumulation_steps",
            args.per_device_train_batch_size * args.gradient_accumulation_steps * num_ranks,
        ),
        "train_micro_batch_size_per_gpu": ("train_args.per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("train_args.gradient_accumulation_steps", args.gradient_accumulation_steps),
        "gradient_clipping": ("train_args.max_grad_norm", args.max_grad_norm),
    }
    if value == "auto":
        known = key in owned or key in REFUSED or key in ("bf16", "bfloat16", "fp16", "optimizer", "zero_optimization")
        return [] if known else [_unknown(key, [*owned, *REFUSED])]
    if key in owned:
        return _agrees(key, value, *owned[key])
    if key in ("bf16", "bfloat16", "fp16"):
        return _precision_problems(key, value, args.mixed_dtype == ("float16" if key == "fp16" else "bfloat16"))
    if key == "optimizer":
        return _optimizer_problems(value, args)
    if key == "zero_optimization":
        return _zero_problems(value, config)
    if key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        return _agrees(key, value, "train_args.optim", key == "zero_allow_untested_optimizer")
    if value is False or value is None or value == {"enabled": False}:
        return [] if key in REFUSED else [_unknown(key, [*owned, *REFUSED])]
    return [f"{key}: {REFUSED[key]}" if key in REFUSED else _unknown(key, [*owned, *REFUSED, "zero_optimization", "optimizer"])]


def _unknown(key: str, known: list[str]) -> str:
    near = nearest(key, known)
    return f"{key}: no key of DeepSpeed's that Paceline knows" + (f"; did you mean {near}?" if near else "")


def _agrees(key: str, value: object, ours: str, wanted: object) -> list[str]:
    same = list(value) == list(wanted) if isinstance(wanted, list) and isinstance(value, list | tuple) else value == wanted
    same = same and isinstance(value, bool) == isinstance(wanted, bool)
    return [] if same else [f"{key}: {value}; the config says {wanted}, set `{ours}`"]


def _precision_problems(key: str, value: Any, wanted: bool) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{key}: {value} is no object"]
    found = []
    for sub, one in value.items():
        if sub == "enabled":
            found += [] if one == "auto" else _agrees(f"{key}.enabled", one, "train_args.precision", wanted)
        elif value.get("enabled") is not False and one != "auto":
            found.append(f"{key}.{sub}: {_DTYPES}")
    return found


def _optimizer_problems(value: Any, args: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"optimizer: {value} is no object"]
    found = [f"optimizer.{key}: {_FEATURE}" for key in value if key not in ("type", "params")]
    kind = value.get("type", "auto")
    if kind != "auto" and str(kind).lower() != args.optim:
        found.append(f"optimizer.type: {kind}; the config says {args.optim}, set `train_args.optim`")
    params = value.get("params", "auto")
    for key, one in params.items() if isinstance(params, Mapping) else ():
        if one == "auto":
            continue
        if key not in _OPTIMIZER_PARAMS:
            found.append(f"optimizer.params.{key}: the optimizer is built from `train_args`")
            continue
        ours, wanted = _OPTIMIZER_PARAMS[key]
        found += _agrees(f"optimizer.params.{key}", one, ours, wanted(args))
    return found


def _zero_problems(value: Any, config: Config) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"zero_optimization: {value} is no object"]
    found = []
    for key, one in value.items():
        name = f"zero_optimization.{key}"
        if one == "auto":
            continue
        if key == "stage":
            found += _agrees(name, one, "parallel.deepspeed_stage", config.parallel.deepspeed_stage)
        elif key in ("offload_optimizer", "offload_param"):
            found += _offload_problems(name, one, config.parallel.offload)
        elif key == "stage3_gather_16bit_weights_on_model_save":
            pass  # model/ is written whole, whatever this says
        elif key not in HONOURED_ZERO:
            found.append(_unknown(name, [f"zero_optimization.{one}" for one in HONOURED_ZERO]))
        elif not _is_a(one, HONOURED_ZERO[key]):
            found.append(f"{name}: {one!r} is no {'number' if HONOURED_ZERO[key] is int else 'boolean'}")
    return found


def _is_a(value: object, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and float(value).is_integer()


def _offload_problems(name: str, value: Any, offload: str) -> list[str]:
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    wanted = "cpu" if offload == "all" or (offload == "optimizer" and name.endswith("optimizer")) else "none"
    if device not in ("auto", wanted) and not (device is None and wanted == "none"):
        return [f"{name}.device: {device}; the config says {wanted}, set `parallel.offload`"]
    more = [key for key in value if key != "device" and value[key] != "auto"] if isinstance(value, Mapping) else []
    return [f"{name}.{key}: set by Paceline" for key in more if wanted == "cpu"]


def zero_section(config: Config, trained_elements: int, low_bytes: int) -> dict[str, Any]:
    """`zero_optimization` for DeepSpeed: Paceline's own choices, then what the user's JSON says.

    The bucket is that of `parallel.bucket_cap_mb`, never more than all gradients (DeepSpeed's own default takes 5e8 elements
    whatever the model's size). At stage 3 every parameter is cut up and none kept after its use, as the ZeRO paper has it and
    as the declared cost counts it; DeepSpeed's defaults keep parameters of up to 1e5 elements whole on every rank, and all
    of them from forward to backward in models below 1e9."""
    parallel = config.parallel
    stage = parallel.deepspeed_stage
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
    if parallel.offload in ("optimizer", "all"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.offload == "all":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    theirs = given_json(parallel).get("zero_optimization", {})
    if isinstance(theirs, Mapping):
        section |= {key: HONOURED_ZERO[key](one) for key, one in theirs.items() if key in HONOURED_ZERO and one != "auto"}
    return section


def engine_config(config: Config, trained_elements: int) -> dict[str, Any]:
    """The whole config for ``deepspeed.initialize``."""
    args = config.train_args
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.mixed_dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_section(config, trained_elements, 2 if args.mixed_dtype else 0),
    }

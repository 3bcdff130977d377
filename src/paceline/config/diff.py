"""Which config changes leave the results of a resumed run unchanged."""

from collections.abc import Mapping

from pydantic import JsonValue

from paceline.config.schema import Config

#: Modes whose results differ from `single` by design: they are not compared with it, and `auto`
#: never selects them.
OTHER_TRAINING = ("local_sgd", "diloco", "parameter_server")

#: Keys that do not change the results; all others must be unchanged when a run resumes.
FREE_KEYS = (
    "output_dir", "checkpoint_dir", "resume", "report_to", "parallel.", "train_args.logging_steps",
    "train_args.save_steps", "train_args.save_total_limit", "train_args.async_save",
    "train_args.eval_steps", "train_args.per_device_eval_batch_size", "evaluation.",
    "train_args.dataloader_num_workers", "train_args.dataloader_prefetch_factor",
    "train_args.dataloader_pin_memory", "train_args.gradient_checkpointing", "train_args.profile",
    "train_args.per_device_train_batch_size", "train_args.auto_find_batch_size",
    "train_args.gradient_accumulation_steps", "train_args.global_batch_size",
    "recovery.max_restarts", "recovery.save_interval_s", "recovery.on_save_error",
    "recovery.mtbf_hours",
    "recovery.rejoin_timeout_s", "recovery.watchdog", "recovery.hang_warning_s",
    "recovery.hang_timeout_s", "recovery.replica_check_steps", "recovery.max_consecutive_skips",
    "train_args.push_to_hub", "train_args.hub_",
    "trust_remote_code", "parameter_server.num_servers", "parameter_server.dense_placement",
    "parameter_server.on_worker_failure",
    "train_args.run_name", "train_args.project", "train_args.trackio_space_id",
    "callbacks", "train_args.early_stopping", "train_args.load_best_model_at_end",
    "train_args.save_best", "train_args.metric_for_best_model", "train_args.greater_is_better",
)  # fmt: skip


def changes_training(key: str, old: object, new: object) -> bool:
    """Return whether changing ``key`` changes the results, so that resuming requires permission."""
    if key == "parallel.mode" and (old in OTHER_TRAINING or new in OTHER_TRAINING):
        return True
    return not key.startswith(FREE_KEYS)


def has_same_end(stored: Mapping[str, JsonValue], config: Config) -> bool:
    """Return whether ``config`` ends the training by the same rules as the stored config."""
    new_config = config.model_dump(mode="json")
    return _ending_rules(stored) == _ending_rules(new_config)


def _ending_rules(config: Mapping[str, JsonValue]) -> tuple[JsonValue, ...]:
    args = config.get("train_args")
    early_stopping = args.get("early_stopping") if isinstance(args, dict) else None
    return config.get("callbacks") or [], early_stopping

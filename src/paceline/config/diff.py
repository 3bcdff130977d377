"""Which config changes leave the results of a resumed run unchanged."""

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
    "train_args.gradient_accumulation_steps",
    "recovery.max_restarts", "recovery.save_interval_s", "recovery.on_save_error",
    "recovery.rejoin_timeout_s", "recovery.watchdog", "recovery.hang_warning_s",
    "recovery.hang_timeout_s", "recovery.replica_check_steps", "recovery.max_consecutive_skips",
    "trust_remote_code", "parameter_server.num_servers", "parameter_server.dense_placement",
    "parameter_server.on_worker_failure",
)  # fmt: skip


def changes_training(key: str, old: object, new: object) -> bool:
    """Return whether changing ``key`` changes the results, so that resuming requires permission."""
    if key == "parallel.mode" and (old in OTHER_TRAINING or new in OTHER_TRAINING):
        return True
    return not key.startswith(FREE_KEYS)

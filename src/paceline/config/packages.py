"""Optional packages that a config needs. Imports no torch."""

from paceline.config.schema import Config

#: `train_args.optim` → the package (also the name of the extra) that implements it.
OPTIMIZER_PACKAGES = {
    "adamw_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "adamw_torchao_8bit": "torchao",
    "schedule_free_adamw": "schedulefree",
}


def unused_packages(config: Config) -> list[str]:
    """Return the packages that transformers and peft import if they are installed, although this
    run does not use them. Each takes about a second and logs messages about its extensions.

    The code of a custom task may import them, so then there are none.
    """
    if config.task not in ("sft", "pretrain", "classify", "recommend"):
        return []
    needed = OPTIMIZER_PACKAGES.get(config.train_args.optim)
    return [name for name in ("bitsandbytes", "torchao") if name != needed]

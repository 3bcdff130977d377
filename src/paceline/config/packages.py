"""Optional packages that a config needs. Imports no torch."""

from importlib.util import find_spec

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS, TASKS
from paceline.core.errors import ConfigError

#: `train_args.optim` → the package (also the name of the extra) that implements it.
OPTIMIZER_PACKAGES = {
    "adamw_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "adamw_torchao_8bit": "torchao",
    "schedule_free_adamw": "schedulefree",
}

#: Packages that transformers and peft import if they are installed, and that initialize CUDA.
DEVICE_PACKAGES = ("bitsandbytes", "torchao")


def check_optimizer_package(optim: str) -> None:
    """Raise ConfigError if the package that implements the optimizer is not installed."""
    package = OPTIMIZER_PACKAGES.get(optim)
    if package is not None:
        check_package(package, f"`train_args.optim: {optim}`", "set `train_args.optim: adamw`")


def check_package(package: str, setting: str, fix: str, extra: str | None = None) -> None:
    """Raise ConfigError if a package is not installed, which ``setting`` needs.

    Args:
        extra: the extra that installs the package; default: the one of its name.
    """
    if find_spec(package) is None:
        raise ConfigError(
            "{setting} needs {package}, which is not installed",
            code="missing-package",
            fix="run `pip install 'paceline[{extra}]'`, or {advice}",
            setting=setting,
            package=package,
            extra=extra or package,
            advice=fix,
        )


def check_loggers(config: Config) -> None:
    """Raise ConfigError if the package of a logger in ``report_to`` is not installed."""
    for name in config.report_to:
        check_package(name, f"`report_to: [{name}]`", f"remove {name} from `report_to`")
    if config.train_args.trackio_space_id is not None and "trackio" not in config.report_to:
        raise ConfigError(
            "`train_args.trackio_space_id` has no effect without trackio",
            code="no-trackio",
            fix="add trackio to `report_to`, or remove it",
        )


def unused_packages(config: Config) -> list[str]:
    """Return the packages that transformers and peft import if they are installed, although this
    run does not use them. Each takes about a second and logs messages about its extensions.

    The code of a custom task may import them, so then there are none.
    """
    if config.task not in TASKS:
        return []
    needed = {OPTIMIZER_PACKAGES.get(config.train_args.optim)}
    if config.lora.quantize != "none":
        needed.add("bitsandbytes")
    if config.train_args.fp8 != "none":
        needed.add("torchao")
    return [name for name in DEVICE_PACKAGES if name not in needed]


def unused_in_ranks(config: Config) -> list[str]:
    """Return :func:`unused_packages`, and those that only the ranks need not import.

    transformers imports scipy for the losses of object detection, and some releases import
    scikit-learn, which needs scipy, for assisted generation; accelerate imports boto3 for
    SageMaker.
    """
    names = unused_packages(config)
    if config.task not in CAUSAL_TASKS or config.trust_remote_code:
        return names
    # bitsandbytes, torchao and clients of trackers may import it
    uses_scipy = len(names) < 2 or bool(config.report_to)
    uses_boto3 = config.checkpoint_dir is not None or bool(config.report_to)
    return [
        *names,
        *([] if uses_scipy else ["scipy", "sklearn"]),
        *([] if uses_boto3 else ["boto3"]),
    ]

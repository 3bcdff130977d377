"""Translate a config with keys or values of other tools to settings of Paceline."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from paceline.config.compat.binding import bind_key, unsupported_method
from paceline.config.compat.conflicts import resolve_conflicts
from paceline.config.compat.merge import Merge
from paceline.config.compat.parallel.deepspeed import report_overridden_json
from paceline.config.compat.parallel.deepspeed_json import interpret, looks_like_deepspeed
from paceline.config.compat.parallel.strategy import expand
from paceline.config.compat.preference import read_methods
from paceline.config.entries import EntryCollector, Problem, short
from paceline.config.messages import config_error
from paceline.config.settings import RESET, Settings
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText


def translate(
    collector: EntryCollector, tree: Mapping[str, YamlValue], file: Path | None
) -> Settings:
    """Return the settings of a config, with a notice for each key of another tool. The file and the
    overrides are translated together, as the meaning of a key may depend on another one.

    Args:
        collector: the entries of the file, if any, and the overrides.
        tree: the content of the file; empty if there is none.

    Raises:
        ConfigError: the file is not a config for training, or it requests a training method that
            is not supported.
    """
    if file is not None:
        check_kind(tree, file)
    bindings = [bind_key(entry) for entry in collector.entries]
    foreign = [
        binding
        for binding in bindings
        if binding.ignored or binding.methods or (binding.alias and binding.alias.tools)
    ]
    tools = Counter(letter for binding in foreign for letter in binding.tools)
    merge = Merge(bool(foreign), tools)
    merge.problems += collector.problems
    for binding in bindings:
        merge.add_binding(binding)
    expand(merge, None if file is None else file.parent)
    read_methods(merge)
    merge.resolve_precedence()
    unsupported = merge.unsupported_methods()
    if unsupported:  # Other errors in such a config would only distract from this one.
        raise config_error([unsupported_method(unsupported)], file, merge.key_of)
    resolve_conflicts(merge)
    report_overridden_json(merge)
    if file is not None and is_accelerate(tree):
        targets = {*merge.winners, *(problem.target for problem in merge.problems)}
        if not targets & {"model", "dataset"}:
            raise config_error(
                [accelerate_problem(file, merge), *merge.problems], file, merge.key_of
            )
    return merge


_ACCELERATE = (
    "compute_environment", "distributed_type", "downcast_bf16", "main_training_function",
    "num_machines", "num_processes", "rdzv_backend", "same_network",
)  # fmt: skip


def is_accelerate(tree: Mapping[str, YamlValue]) -> bool:
    """Return whether a file is an Accelerate config, which describes how to start processes."""
    return "distributed_type" in tree or sum(key in tree for key in _ACCELERATE) >= 3


def check_kind(tree: Mapping[str, YamlValue], file: Path) -> None:
    """Raise ConfigError for a file that cannot be a training config, regardless of overrides."""
    if looks_like_deepspeed(tree):
        stage = interpret(tree).stage
        kind = "a DeepSpeed config" + (f" (ZeRO stage {stage})" if stage is not None else "")
        raise ConfigError(
            "{file} is {kind}, not a training config: it has no model and no dataset",
            code="deepspeed-config-as-config",
            fix="set `deepspeed: {file}` in your config, or pass it with the config: `paceline sft"
            " CONFIG.yaml --deepspeed {file}`",
            file=file,
            kind=kind,
        )
    if ("provider" in tree and "gpu" in tree) or {"gpu", "gpu_count", "secrets"} <= tree.keys():
        raise ConfigError(
            "{file} is a config of axolotl for a provider of GPUs, not a training config",
            code="axolotl-cloud-config",
            fix="pass the training config, and start Paceline on the machine itself",
            file=file,
        )
    if any(
        "_component_" in str(key) or (isinstance(value, Mapping) and "_component_" in value)
        for key, value in tree.items()
    ):
        raise ConfigError(
            "{file} is a torchtune config (it has `_component_`), which is not supported",
            code="torchtune-config",
            allowed="a config of Paceline, LLaMA-Factory, ms-swift, axolotl, TRL or"
            " alignment-handbook",
            fix="write a config with `model: FOLDER_OR_HUB_ID` and `dataset: ...` (`paceline"
            " config` lists all keys), or use torchtune",
            file=file,
        )
    rest = [key for key in tree if not key.startswith(("_", "fsdp"))]
    if not rest and any(key.startswith("fsdp") for key in tree):
        raise ConfigError(
            "{file} is an FSDP config, not a training config: it has no model and no dataset",
            code="fsdp-config-as-config",
            fix="set `fsdp: {file}` in your config, or set `parallel.mode: zero3`",
            file=file,
        )


def accelerate_problem(file: Path, merge: Merge) -> Problem:
    """Describe an Accelerate config that is passed without a model and a dataset."""
    settings = "; ".join(
        f"`{key}: {short(winner.value)}`"
        for key, winner in merge.winners.items()
        if winner.value is not RESET
    )
    return Problem(
        UserText(
            "this is an Accelerate config: it describes how to start processes, and has no model"
            " and no dataset{meaning}",
            code="accelerate-config",
            meaning=f". It is read as {settings}" if settings else "",
        ),
        fix=(
            f"pass the model and the dataset with it (`paceline sft {file} model=... dataset=...`),"
            " or copy its keys into your own config"
        ),
    )

"""Find the trained model that an export starts from."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint.format import INDEX, MANIFEST, META
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.reader import CheckpointReader, damaged_checkpoint
from paceline.config.packages import unused_packages
from paceline.core.errors import ConfigError
from paceline.core.run_dir import RunDir
from paceline.core.user_code import hide_packages
from paceline.inference.exports.core.forms import ExportSource
from paceline.inference.loading import (
    model_folder,
    quiet_transformers,
    run_config,
    tokenizer_name,
)
from paceline.models.hub_configs import find_file, read_raw_config
from paceline.models.json_config import read_object

if TYPE_CHECKING:
    from paceline.config.schema import Config


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    return (path / META).is_file() and ((path / INDEX).is_file() or (path / MANIFEST).is_file())


def open_source(run: Path) -> ExportSource:
    """Return the trained model of a run, or of the folder of a model or an adapter. Hides optional
    packages that the run does not use from this process.

    Raises:
        ConfigError: there is none.
    """
    folder = model_folder(run)
    content = read_object(folder / "adapter_config.json")
    base = str(folder if content is None else content.get("base_model_name_or_path"))
    config = run_config(folder)
    _hide_unused(config)
    return ExportSource(run, folder, config, content is not None, base)


def check_code(source: ExportSource) -> None:
    """Raise ConfigError if transformers needs code in the model's folder that no run has
    trusted."""
    content = read_raw_config(source.base) or {}
    if source.trusts_code or not content.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING

    if content.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError(
            "{model} is of a type that transformers does not have, and needs the code in its"
            " folder",
            code="export-needs-code",
            fix="export the folder of a run with `trust_remote_code: true` if you trust the code",
            model=source.base,
        )


def tokenizer_folder(source: ExportSource) -> Path:
    """Return the folder of a model's tokenizer: of the base model if an adapter has none."""
    name = tokenizer_name(source.folder, source.base)
    file = find_file(name, "tokenizer.json") or find_file(name, "tokenizer_config.json")
    return source.folder if file is None else file.parent


def _hide_unused(config: Config | None) -> None:
    """Hide optional packages that an export does not use from this process: they take long to
    import and print messages."""
    hide_packages([*([] if config is None else unused_packages(config)), "deepspeed"])


def checkpoint_bytes(path: Path) -> int:
    """Return the size of the weights in a checkpoint."""
    with CheckpointReader(path) as reader:
        return sum(
            dtype.itemsize * math.prod(shape)
            for name, (dtype, shape) in reader.tensors().items()
            if name.startswith(("model/", "buffer/"))
        )


def restore_run(checkpoint: Path, folder: Path) -> None:
    """Write the run as it would be if it had ended with a checkpoint: its config and its model.

    Args:
        folder: existing, empty folder.

    Raises:
        ConfigError: the checkpoint is damaged, or the config of its run is gone.
    """
    from paceline.config.load import load_config
    from paceline.parallel.state import load_full
    from paceline.tasks import load_task
    from paceline.train.components import build_model

    run = RunDir(checkpoint.resolve().parent.parent)
    if not run.config.is_file():
        raise ConfigError(
            "{checkpoint} has no run: {config} does not exist",
            code="checkpoint-without-run",
            fix="give a checkpoint inside the folder of its run, with the run's config.yaml",
            checkpoint=checkpoint,
            config=run.config,
        )
    problem = verify(checkpoint)
    if problem is not None:
        raise damaged_checkpoint(checkpoint, problem)
    config = load_config(run.config, {}).config
    _hide_unused(config)
    quiet_transformers()
    task = load_task(config)
    task.prepared = task.prepare()
    model = build_model(task, config)
    with CheckpointReader(checkpoint) as reader:
        load_full(model, reader)
    target = RunDir(folder)
    shutil.copyfile(run.config, target.config)
    target.model.mkdir()
    task.save_model(model, target.model)

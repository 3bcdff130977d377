"""The base models of an export: whose other weights and files it gets."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.files import Scratch
from paceline.core.texts import UserText
from paceline.inference.exports.core.forms import ExportSource
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import read_raw_config
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, saved_kind
from paceline.models.qwen import is_qwen
from paceline.models.weights.base_checkpoint import (
    BaseCheckpoint,
    link_present,
    missing_weights,
    open_base,
)
from paceline.models.weights.keep_base import MISSING_BASE

logger = logging.getLogger(__name__)


def base_names(source: ExportSource) -> list[str]:
    """Return the folders or hub IDs of the models whose weights an exported model may have: the
    adapters' base model, or the model's folder and the model that its run has started from. The
    latter is not downloaded if the folder has all of its weights."""
    folder = source.folder
    if source.is_adapter:
        return [source.base]
    if source.config is None:
        return [str(folder)]
    is_local = Path(source.config.model).expanduser().is_dir()
    if not (folder / MISSING_BASE).is_file() and not is_local:
        return [str(folder)]
    return [str(folder), str(Path(resolve_model(source.config.model)).expanduser())]


def present_part(name: str, stack: ExitStack) -> Path | None:
    """Return a folder with the files of a model that are still there, and warn about the others;
    None if all of them are, or if no weights are.

    Args:
        stack: removes the folder.
    """
    missing = missing_weights(name)
    if not missing:
        return None
    logger.warning(
        UserText(
            "{num_weights} weights of the base model {model} are gone with their files, and will be"
            " missing in the export: {examples}",
            code="export-without-missing-weights",
            num_weights=len(missing),
            model=name,
            examples=", ".join(missing[:3]),
        )
    )
    part = stack.enter_context(Scratch("paceline-export-"))
    link_present(name, part)
    return part


def base_checkpoints(
    source: ExportSource, names: list[str], allow_missing: bool
) -> list[BaseCheckpoint]:
    """Return the files of the models of :func:`base_names`.

    Raises:
        ConfigError: they are gone, and the exported model needs them.
    """
    if saved_kind(source.folder) not in (LANGUAGE, VISION_LANGUAGE):
        return []  # its head has replaced the base model's
    bases = []
    for name in names:
        if is_qwen(read_raw_config(name)):
            continue  # the conversion of such a model keeps all weights
        is_needed = source.is_adapter or (source.folder / MISSING_BASE).is_file()
        try:
            bases.append(open_base(name))
        except ConfigError as error:
            if source.is_adapter or (is_needed and not allow_missing):
                raise
            if is_needed:
                logger.warning(
                    UserText(
                        "{source} lacks weights of its base model, and so will the export:"
                        " {reason}",
                        code="export-without-base-weights",
                        source=source.folder,
                        reason=error.what,
                    )
                )
    return bases

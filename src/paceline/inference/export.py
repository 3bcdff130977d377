"""Export of the model of a run."""

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from paceline.checkpoint.writer import reason_of
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import Scratch, replace_dir
from paceline.core.texts import UserText
from paceline.inference.loading import load_model, model_folder, run_config
from paceline.inference.merge import (
    LogitComparison,
    compare_logits,
    load_merged,
    merge_adapters,
    some_logits,
)
from paceline.launch.after_training.hub_upload import upload_model
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import read_raw_config
from paceline.models.json_config import read_object
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, saved_kind
from paceline.models.language import copy_processor
from paceline.models.qwen import is_qwen
from paceline.models.weights.base_checkpoint import (
    BaseCheckpoint,
    link_present,
    missing_weights,
    open_base,
)
from paceline.models.weights.keep_base import MISSING_BASE, copy_base_files, save_with_base

logger = logging.getLogger(__name__)

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Args:
        path: folder of the model.
        comparison: how its logits differ from the logits before the merge; None without a merge.
    """

    path: Path
    comparison: LogitComparison | None


def export(
    run: Path,
    *,
    merge: bool = False,
    output: str | None = None,
    dtype: str = "auto",
    allow_missing: bool = False,
) -> Exported:
    """Write the model of ``run`` to ``output`` (default: ``RUN/exported``), in the form that
    ``from_pretrained`` loads, with the weights of the base model that transformers does not load. A
    merged model is loaded again and compared to the model with its adapters.

    Args:
        merge: add the adapters into the base model's weights.
        dtype: dtype of the written weights: auto (as they are), float32, bfloat16, float16.
        allow_missing: whether the model is also written if files of its base model are gone that
            store none of its own weights.

    Raises:
        ConfigError: there is no model, nothing to merge, files of the base model are gone, or the
            target exists.
        RunError: the model cannot be written, or a merged model differs by more than the rounding
            of its weights explains.
    """
    if dtype not in _DTYPES:
        raise ConfigError(
            "unknown `--dtype {dtype}`",
            code="unknown-dtype",
            allowed=", ".join(_DTYPES),
            dtype=dtype,
        )
    source = model_folder(run)
    adapted = (source / "adapter_config.json").is_file()
    if adapted and not merge:
        raise ConfigError(
            "{source} is an adapter, which peft loads without an export",
            code="adapter-without-merge",
            fix="add --merge to merge it into its base model",
            source=source,
        )
    if merge and not adapted:
        raise ConfigError(
            "{source} is a full model without an adapter to merge",
            code="nothing-to-merge",
            fix="remove --merge",
            source=source,
        )
    final = Path(output) if output else run / "exported"
    if final.exists():
        raise ConfigError(
            "{final} already exists",
            code="export-exists",
            fix="give another folder with --output DIR",
            final=final,
        )
    names = _base_names(source, adapted)
    with ExitStack() as stack:
        part = _present_part(names[0], stack) if adapted and allow_missing else None
        bases = _base_checkpoints(source, [str(part)] if part else names, adapted, allow_missing)
        comparison = _write(run, part, final, bases, names, dtype)
    return Exported(final, comparison)


def _write(
    run: Path,
    part: Path | None,
    final: Path,
    bases: list[BaseCheckpoint],
    names: list[str],
    dtype: str,
) -> LogitComparison | None:
    """Write the model of a run, and return how it differs from the model with adapters.

    Args:
        part: files of the base model that are still there; None if all are.
        bases: models whose other weights are written as well.
        names: models whose other files are copied.
    """
    source = model_folder(run)
    model, tokenizer = load_model(run, dtype, part)
    adapted = (source / "adapter_config.json").is_file()
    expected = some_logits(model) if adapted else None
    if adapted:
        model = merge_adapters(model)
    comparison = None
    staging_dir = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        staging_dir.mkdir(parents=True)
        save_with_base(model, staging_dir, bases, None if dtype == "auto" else model.dtype)
        tokenizer.save_pretrained(str(staging_dir))
        copy_processor(source, staging_dir)
        for name in names:
            copy_base_files(name, staging_dir)
        if expected is not None:
            kind = type(model)
            del model  # so that only one model is in memory
            comparison = compare_logits(expected, load_merged(kind, staging_dir))
        replace_dir(staging_dir, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise RunError(
            "{final} could not be written: {reason}",
            code="export-not-written",
            fix="free some space, or give another folder with --output DIR",
            final=final,
            reason=reason_of(error),
        ) from error
    except BaseException:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise
    return comparison


def _base_names(source: Path, adapted: bool) -> list[str]:
    """Return the folders or hub IDs of the models whose weights an exported model may have: the
    adapters' base model, or the model's folder and the model that its run has started from. The
    latter is not downloaded if the folder has all of its weights."""
    if adapted:
        content = read_object(source / "adapter_config.json") or {}
        return [str(content.get("base_model_name_or_path"))]
    config = run_config(source)
    if config is None:
        return [str(source)]
    if not (source / MISSING_BASE).is_file() and not Path(config.model).expanduser().is_dir():
        return [str(source)]
    return [str(source), str(Path(resolve_model(config.model)).expanduser())]


def _present_part(name: str, stack: ExitStack) -> Path | None:
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


def _base_checkpoints(
    source: Path, names: list[str], adapted: bool, allow_missing: bool
) -> list[BaseCheckpoint]:
    """Return the files of the models of :func:`_base_names`.

    Raises:
        ConfigError: they are gone, and the exported model needs them.
    """
    if saved_kind(source) not in (LANGUAGE, VISION_LANGUAGE):
        return []  # its head has replaced the base model's
    bases = []
    for name in names:
        if is_qwen(read_raw_config(name)):
            continue  # the conversion of such a model keeps all weights
        is_needed = adapted or (source / MISSING_BASE).is_file()
        try:
            bases.append(open_base(name))
        except ConfigError as error:
            if adapted or (is_needed and not allow_missing):
                raise
            if is_needed:
                logger.warning(
                    UserText(
                        "{source} lacks weights of its base model, and so will the export:"
                        " {reason}",
                        code="export-without-base-weights",
                        source=source,
                        reason=error.what,
                    )
                )
    return bases


def push(
    run: Path, repository: str, folder: Path | None = None, private: bool | None = None
) -> tuple[str, str]:
    """Upload the model of ``run`` with a model card to the Hugging Face hub; see
    :func:`paceline.launch.after_training.hub_upload.upload_model`.

    Args:
        folder: folder with another form of the model, such as the merged one; default: the model
            as the run wrote it.
    """
    return upload_model(folder or model_folder(run), run, repository, private)

"""Export of the model of a run."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from paceline.checkpoint.writer import reason_of
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import replace_dir
from paceline.inference.generate import load_model, model_folder
from paceline.inference.merge import (
    LogitComparison,
    compare_logits,
    load_merged,
    merge_adapters,
    some_logits,
)
from paceline.launch.after_training.hub_upload import upload_model
from paceline.models.language import copy_processor

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
    run: Path, *, merge: bool = False, output: str | None = None, dtype: str = "auto"
) -> Exported:
    """Write the model of ``run`` to ``output`` (default: ``RUN/exported``), in the form that
    ``from_pretrained`` loads. A merged model is loaded again and compared to the model with its
    adapters.

    Args:
        merge: add the adapters into the base model's weights.
        dtype: dtype of the written weights: auto (as they are), float32, bfloat16, float16.

    Raises:
        ConfigError: there is no model, nothing to merge, or the target exists.
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
    model, tokenizer = load_model(run, dtype)
    expected = some_logits(model) if adapted else None
    if adapted:
        model = merge_adapters(model)
    comparison = None
    staging_dir = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        staging_dir.mkdir(parents=True)
        model.save_pretrained(str(staging_dir))
        tokenizer.save_pretrained(str(staging_dir))
        copy_processor(source, staging_dir)
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
    except RunError:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise
    return Exported(final, comparison)


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

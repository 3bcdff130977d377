"""Export the model of a run, with a proof that the export answers as the trained model."""

import errno
import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from paceline.checkpoint.writer import reason_of
from paceline.core.errors import ConfigError, RunError
from paceline.core.files import Scratch, replace_dir
from paceline.inference.exports.bases import base_checkpoints, base_names, present_part
from paceline.inference.exports.core.answers import max_answers_bytes
from paceline.inference.exports.core.comparison import ProofCheck
from paceline.inference.exports.core.estimate import (
    check_estimate,
    check_space,
    model_bytes,
    stored_sizes,
)
from paceline.inference.exports.core.forms import ExportForm, ExportSource
from paceline.inference.exports.core.prove import TrainedAnswers, prove, record_answers
from paceline.inference.exports.full import FullForm, write_full
from paceline.inference.exports.source import (
    check_code,
    checkpoint_bytes,
    is_checkpoint,
    open_source,
    restore_run,
)
from paceline.inference.loading import load_model, model_folder
from paceline.launch.after_training.hub_upload import upload_model
from paceline.models.hub_configs import read_raw_config
from paceline.models.weights.base_checkpoint import BaseCheckpoint

logger = logging.getLogger(__name__)

#: Size of a vocabulary, if a model's config does not say it: the largest of common models.
_VOCABULARY_SIZE = 262_144


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Args:
        path: folder of the model.
        form: name of its form.
        size_bytes: size of its files.
        check: how it differs from the trained model.
    """

    path: Path
    form: str
    size_bytes: int
    check: ProofCheck


@dataclass(frozen=True)
class _Bases:
    """The base models of an export.

    Args:
        names: folders or hub IDs of the models whose files are copied.
        checkpoints: models whose other weights are written.
        part: folder with the files of the adapters' base model that are still there; None if all
            are.
    """

    names: list[str]
    checkpoints: list[BaseCheckpoint]
    part: Path | None


def export(
    run: Path,
    form: ExportForm,
    *,
    output: str | None = None,
    allow_missing: bool = False,
    limit: float | None = None,
) -> Exported:
    """Write the model of ``run`` in a form, load it in a new process, and compare its answers to
    the trained model's.

    Args:
        run: folder of a run, one of its checkpoints, or the folder of a model or an adapter.
        output: folder to write to; default: a folder of the run with the form's name.
        allow_missing: whether the model is also written if files of its base model are gone that
            store none of its own weights.
        limit: largest accepted difference, instead of the form's.

    Raises:
        ConfigError: the run has no model or its base model's files are gone, the model cannot be
            written in this form, the target exists, or the disk or the memory is too small.
        RunError: the export cannot be written, or it differs from the trained model.
    """
    final = Path(output).expanduser() if output else _default_target(run, form)
    if os.path.lexists(final):
        raise _target_exists(final)
    with ExitStack() as stack:
        try:
            if not is_checkpoint(run):
                return _export(open_source(run), form, final, stack, allow_missing, limit)
            size = checkpoint_bytes(run)
            check_space(size, size, final.parent)
            restored = _scratch(final, stack)
            restore_run(run, restored)
            name = f"{_run_of(run).resolve().name}-{run.resolve().name}"
            source = replace(open_source(restored), name=name)
            return _export(source, form, final, stack, allow_missing, limit)
        except (OSError, SafetensorError) as error:
            raise RunError(
                "{final} could not be written: {reason}",
                code="export-not-written",
                fix="free some space, or give another folder with --output DIR",
                final=final,
                reason=reason_of(error),
            ) from error


def _target_exists(final: Path) -> ConfigError:
    return ConfigError(
        "{final} already exists",
        code="export-exists",
        fix="give another folder with --output DIR",
        final=final,
    )


def _default_target(run: Path, form: ExportForm) -> Path:
    name = "exported" if isinstance(form, FullForm) else form.name
    return _run_of(run) / f"{name}-{run.resolve().name}" if is_checkpoint(run) else run / name


def _run_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run."""
    run, given = checkpoint.resolve().parent.parent, checkpoint.parent.parent
    return given if given.resolve() == run else run  # as the user has written it


def _scratch(final: Path, stack: ExitStack) -> Path:
    """Return a folder beside the target, which is removed at the end, or, if this process is
    killed, by the next export to the same place."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(Scratch(".paceline-export-", str(final.parent)))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigError(
            "{folder} cannot be written to: {reason}",
            code="export-folder-not-writable",
            fix="give a folder that you may write to with --output DIR",
            folder=final.parent,
            reason=reason_of(error),
        ) from error


def _export(
    source: ExportSource,
    form: ExportForm,
    final: Path,
    stack: ExitStack,
    allow_missing: bool,
    limit: float | None,
) -> Exported:
    check_code(source)
    is_gone = source.is_adapter and read_raw_config(source.base) is None
    if is_gone:  # say so before a form looks for it on the hub
        _find_bases(source, stack, allow_missing)
    form.check(source)
    bases = _find_bases(source, stack, allow_missing)
    is_full = isinstance(form, FullForm)
    # Forms read safetensors files; a folder with pickled weights is written again as such.
    is_pickled = not source.is_adapter and not stored_sizes(str(source.folder))
    merges = form.merged_dtype is not None and (is_full or source.is_adapter or is_pickled)
    scratch_bytes = 0
    if merges and not is_full:
        scratch_bytes = model_bytes(source.base, form.merged_dtype or "auto")
    scratch_bytes += max_answers_bytes(_vocabulary_size(source))
    check_estimate(form.estimate(source), scratch_bytes, final.parent)
    scratch = _scratch(final, stack)
    answers = _record(source, form, scratch, bases, merges)
    folder = scratch / "export"
    folder.mkdir()
    form.write(source, scratch / "model" if merges else source.folder, folder)
    shutil.rmtree(scratch / "model", ignore_errors=True)
    accepted = form.limit if limit is None else replace(form.limit, value=limit)
    check = prove(form, folder, answers, accepted, source.trusts_code)
    try:
        replace_dir(folder, final, overwrites=False)
    except OSError as error:
        if not os.path.lexists(final):
            raise
        raise _target_exists(final) from error  # another process has made it meanwhile
    size_bytes = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
    return Exported(final, form.name, size_bytes, check)


def _vocabulary_size(source: ExportSource) -> int:
    content = read_raw_config(source.base) or {}
    text = content.get("text_config")
    sizes = [each.get("vocab_size") for each in (content, text) if isinstance(each, dict)]
    return next((size for size in sizes if isinstance(size, int)), _VOCABULARY_SIZE)


def _find_bases(source: ExportSource, stack: ExitStack, allow_missing: bool) -> _Bases:
    names = base_names(source)
    part = present_part(names[0], stack) if source.is_adapter and allow_missing else None
    checkpoints = base_checkpoints(source, [str(part)] if part else names, allow_missing)
    return _Bases(names, checkpoints, part)


def _record(
    source: ExportSource, form: ExportForm, scratch: Path, bases: _Bases, merges: bool
) -> TrainedAnswers:
    """Store the trained model's answers, and write the full model to ``scratch/model`` if
    ``merges``. The model is no longer in memory afterwards."""
    # A narrower dtype follows only after the merge, so that nothing is rounded before it.
    dtype = "float32" if form.merged_dtype == "float32" else "auto"
    model, tokenizer = load_model(source.run, dtype, bases.part)
    answers = record_answers(model, tokenizer, scratch / "answers.safetensors")
    if merges:
        model = model.to("cpu")
        folder = scratch / "model"
        folder.mkdir()
        write_full(
            model,
            tokenizer,
            source,
            folder,
            bases.checkpoints,
            bases.names,
            form.merged_dtype or "auto",
        )
    return answers


def push(
    run: Path, repository: str, folder: Path | None = None, private: bool | None = None
) -> tuple[str, str]:
    """Upload the model of ``run`` with a model card to the Hugging Face hub; see
    :func:`paceline.launch.after_training.hub_upload.upload_model`.

    Args:
        folder: folder with another form of the model, such as the merged one; default: the model
            as the run wrote it.
    """
    trained = _run_of(run) if is_checkpoint(run) else run
    return upload_model(folder or model_folder(run), trained, repository, private)

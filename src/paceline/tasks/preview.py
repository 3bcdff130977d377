"""Preview the first samples of a config's dataset: tokens as the model will see them (with the chat
template applied, label tokens and truncation marked), labeled texts, resized images, or rows of a
click log with their IDs."""

import base64
import io
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, TypedDict

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS, ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.encoding.chunks import make_setup
from paceline.data.encoding.prepare import text_kind
from paceline.data.images import ImageDataset
from paceline.data.kinds.base import NO_ANSWER, TOO_LONG, Encoded, SampleKind
from paceline.data.kinds.label import (
    SIGNED_CLASSES,
    LabelConverter,
    LabeledText,
    have_sign_only,
)
from paceline.data.kinds.registry import load_kind
from paceline.data.sources.kinds import classifies_images
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.sources.rows import BrokenRow, MalformedRow, Unsupported, unsupported_row
from paceline.data.streaming.sources import open_first_file
from paceline.data.text.new_tokens import config_tokenizer
from paceline.data.text.token_columns import Label
from paceline.data.text.tokenizer import LoadedTokenizer
from paceline.models.builtin import resolve_model
from paceline.models.kinds import reads_images
from paceline.tasks.base import Notice
from paceline.tasks.classify import ClassifyTask
from paceline.tasks.recommend import RecommendTask

MAX_ROWS = 100
#: Only this many tokens of a row are shown; its counts include all tokens.
MAX_TOKENS = 4096
#: Only this many IDs of a row are shown per column.
_MAX_IDS = 20


class Segment(TypedDict):
    """Consecutive tokens with the same state: ``label`` if they have a loss, ``cut`` if they are
    truncated and not trained on."""

    text: str
    label: bool
    cut: bool


class Field(TypedDict):
    """One column in a row of a click log."""

    name: str
    value: str


class PreviewRow(TypedDict, total=False):
    """A row of the preview.

    Attributes:
        source, place, format: source of the row, position in it, and format or None.
        reason: why the row is dropped, or None.
        hidden_tokens: number of tokens that are not in ``segments``.
        parts: number of samples that a document is divided into.
        answer: ``chosen`` or ``rejected`` for each of the two rows of a pair; ``desirable`` or
            ``undesirable`` for an answer of KTO.
        label: class of an image, or label of a row of a click log.
        shape: shape of an image, [channels, height, width].
        image: the image as a `data:` URI, resized for the model but not normalized.
        fields: columns of a click log: numbers as scaled for the model, IDs as row numbers in the
            table of the column.
    """

    source: str
    place: str
    format: str | None
    reason: str | None
    segments: list[Segment]
    num_tokens: int
    label_tokens: int
    cut_tokens: int
    hidden_tokens: int
    parts: int
    answer: str
    label: str
    shape: list[int]
    image: str
    fields: list[Field]


class Preview(TypedDict, total=False):
    """The first rows of each source. Previews of text also have ``max_length`` and ``overlong``."""

    task: str
    max_length: int
    overlong: str
    rows: list[PreviewRow]
    notices: list[Notice]


def preview(config: Config, rows: int = 5) -> Preview:
    """Return the first ``rows`` rows of each source of ``dataset``, in file order. Images are taken
    at even intervals, to show several classes.

    Raises:
        ConfigError: the task is defined by the user, or the data are invalid.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(
            "`--rows {rows}` is out of range",
            code="rows-out-of-range",
            allowed="1 to {max_rows}",
            rows=rows,
            max_rows=MAX_ROWS,
        )
    if config.task in _WITHOUT_TOKENS:
        shown, notices = _WITHOUT_TOKENS[config.task](config, rows)
        return Preview(task=config.task, rows=shown, notices=notices)
    if config.task not in (*CAUSAL_TASKS, "reward"):
        raise ConfigError(
            "a preview is not supported with `task: {task}`: only the task knows the form of its"
            " samples",
            code="preview-with-task",
            allowed=", ".join((*CAUSAL_TASKS, "reward", *_WITHOUT_TOKENS)),
            fix="check with `paceline sft CONFIG --dry-run` that the data can be read",
            task=config.task,
        )
    folder = config_tokenizer(config, resolve_model)
    name = "reward" if config.task == "reward" else text_kind(config)
    name = "vision" if reads_images(config) else name
    setup, template_notices = make_setup(config, name, folder, ())
    kind = load_kind(name)(setup)
    sources = [open_first_file(source) for source in config.sources()]
    shown = [row for source in sources for row in _rows(source, rows, kind)]
    notices = [*template_notices, *(notice for source in sources for notice in source.notices)]
    return Preview(
        task=config.task,
        max_length=config.train_args.max_length,
        overlong=config.train_args.truncation_strategy,
        rows=shown,
        notices=notices,
    )


def _rows(source: ResolvedSource, rows: int, kind: SampleKind) -> list[PreviewRow]:
    kind = kind.for_source(source)
    shown = []
    for place, raw_row in islice(source.rows(kind.config.train_args.seed), rows):
        try:
            encoded = kind.encode([kind.read(raw_row, place)])[0]
        except MalformedRow as reason:
            encoded = UserText("{reason}", code="row-malformed", reason=reason)
        tally = kind.tally.take()
        if isinstance(encoded, str):
            if "template" in encoded and tally.refusals:
                encoded = UserText(
                    "{reason}: {refusal}",
                    code="row-refused",
                    reason=encoded,
                    refusal=next(iter(tally.refusals)),
                )
            rows_of_sample = [_dropped_row(encoded)]
        else:
            rows_of_sample = _encoded_rows(encoded, kind)
        row_format = next(iter(tally.seen), None)
        shown += [
            PreviewRow(source=source.label, place=place, format=row_format, **row)
            for row in rows_of_sample
        ]
    return shown


def _dropped_row(reason: str) -> PreviewRow:
    return PreviewRow(
        reason=reason,
        segments=[],
        num_tokens=0,
        label_tokens=0,
        cut_tokens=0,
        hidden_tokens=0,
        parts=0,
    )


def _encoded_rows(sample: Encoded, kind: SampleKind) -> list[PreviewRow]:
    """Return a row for each sequence of a sample."""
    rows = []
    for name, sequence in kind.sequences(sample):
        row = _encoded_row(sequence, kind.tokenizer, kind.config)
        if name:
            row["answer"] = name
        rows.append(row)
    # A pair is dropped if one of its answers is.
    reason = next((row["reason"] for row in rows if row["reason"]), None)
    for row in rows:
        row["reason"] = reason
    return rows


def _encoded_row(sample: Encoded, tokenizer: LoadedTokenizer, config: Config) -> PreviewRow:
    max_length = config.train_args.max_length
    ids, labels = sample.input_ids, sample.labels_mask.copy()
    labels[:1] = False  # no token before it predicts it
    length, reason = len(ids), None
    is_document = sample.values.get("is_document", False)
    num_trained = length if is_document else min(length, max_length)
    if config.task in ROLLOUT_TASKS:  # a prompt has no labels, and is never truncated
        if length > max_length - config.grpo.max_completion_length:
            num_trained, reason = 0, TOO_LONG
    elif num_trained < length and config.train_args.truncation_strategy == "drop":
        num_trained, reason = 0, TOO_LONG
    elif not labels[:num_trained].any():
        is_complete = num_trained == length
        nothing = UserText("nothing to learn from", code="row-without-labels")
        reason = nothing if is_complete else NO_ANSWER
    cut = np.arange(length) >= (num_trained if reason is None else 0)
    num_shown = min(length, MAX_TOKENS)
    changes = np.diff(labels[:num_shown]) | np.diff(cut[:num_shown])
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), num_shown] if num_shown else []
    segments = [
        Segment(
            text=tokenizer.decode(ids[start:end].tolist()),
            label=bool(labels[start]),
            cut=bool(cut[start]),
        )
        for start, end in pairwise(bounds)
    ]
    return PreviewRow(
        reason=reason,
        segments=segments,
        num_tokens=length,
        label_tokens=int(np.count_nonzero(labels & ~cut)),
        cut_tokens=int(np.count_nonzero(cut)),
        hidden_tokens=length - num_shown,
        parts=-(-length // max_length) if is_document else 1,
    )


def _images(config: Config, rows: int) -> tuple[list[PreviewRow], list[Notice]]:
    task = ClassifyTask(config)
    task.check()
    prepared = task.prepare()
    index, form = prepared.handle.train, prepared.handle.form
    pixels = ImageDataset(index, replace(form, mean=None, std=None))
    numbers = np.linspace(0, len(index) - 1, min(rows, len(index))).round().astype(int)
    shown = []
    for number in np.unique(numbers).tolist():
        image, label = pixels[number]
        if index.names is None:
            place = f"image {int(index.rows[number])} of {index.source}"
        else:
            place = index.names[number]
        shown.append(
            PreviewRow(
                place=place,
                label=index.classes[int(label)],
                shape=list(image.shape),
                image=_as_uri(image),
            )
        )
    return shown, prepared.notices


def _as_uri(image: torch.Tensor) -> str:
    from PIL import Image

    values = (image.clamp(0, 1) * 255).round().byte()
    pixels = values[0] if len(values) == 1 else values.permute(1, 2, 0)
    png = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _clicks(config: Config, rows: int) -> tuple[list[PreviewRow], list[Notice]]:
    task = RecommendTask(config)
    task.check()
    task.prepared = task.prepare()
    log = task.build_datasets()[0]
    array_rows = [log[number].array_row for number in range(min(rows, len(log)))]
    places = np.array(array_rows, dtype=np.int64)
    batch = log.batch(places)
    dense = config.recommend.dense_features or [
        f"dense {number + 1}" for number in range(batch.dense.shape[1])
    ]
    shown = []
    for row, place in enumerate(places.tolist()):
        fields = [
            Field(name=name, value=f"{batch.dense[row, column]:.4g}")
            for column, name in enumerate(dense)
        ]
        for name, size, ids, starts in zip(
            log.names, log.tables, batch.ids, batch.starts, strict=True
        ):
            row_ids = ids[starts[row] : starts[row + 1]].tolist()
            text = ", ".join(map(str, row_ids[:_MAX_IDS])) or "none"
            if len(row_ids) > _MAX_IDS:
                text += f" and {len(row_ids) - _MAX_IDS} more"
            fields.append(Field(name=name, value=f"{text} of {size:,}"))
        shown.append(
            PreviewRow(place=f"row {place + 1:,}", label=f"{batch.label[row]:g}", fields=fields)
        )
    return shown, task.prepared.notices


def _labeled(config: Config, rows: int) -> tuple[list[PreviewRow], list[Notice]]:
    if classifies_images(config):
        return _images(config, rows)
    sources = [open_first_file(source) for source in config.sources()]
    shown = []
    for source in sources:
        raw_rows = list(islice(source.rows(config.train_args.seed), rows))
        spec = source.spec
        classes: Collection[str] = config.classify.labels
        if not classes:
            convert = LabelConverter(
                source.label, spec.columns, spec.ignore_columns, SIGNED_CLASSES
            )
            classes = _signed_classes(raw_rows, convert)
        converter = LabelConverter(source.label, spec.columns, spec.ignore_columns, classes)
        for place, raw_row in raw_rows:
            try:
                if isinstance(raw_row, BrokenRow):
                    raise MalformedRow(raw_row.reason)
                sample = converter(raw_row)
            except MalformedRow as reason:
                shown.append(PreviewRow(place=place, label=f"none; the row is dropped: {reason}"))
                continue
            except Unsupported as error:
                raise unsupported_row(error, place) from None
            fields = [
                Field(name=name, value=text)
                for name, text in zip(("text", "pair"), sample.texts, strict=False)
            ]
            label = ", ".join(map(str, sample.labels)) or "no class"
            shown.append(PreviewRow(place=place, label=label, fields=fields))
    return shown, [notice for source in sources for notice in source.notices]


def _signed_classes(
    rows: Iterable[tuple[Any, Any]], convert: Callable[[Any], LabeledText]
) -> Collection[str]:
    """Return the classes -1 and 1 if the labels of the rows have only these values."""
    labels: set[Label] = set()
    for _, row in rows:
        with suppress(MalformedRow, Unsupported):
            labels.update(convert(row).labels)
    return SIGNED_CLASSES if have_sign_only(labels) else ()


_WITHOUT_TOKENS: dict[str, Callable[[Config, int], tuple[list[PreviewRow], list[Notice]]]] = {
    "classify": _labeled,
    "recommend": _clicks,
}


def as_text(result: Preview) -> str:
    """Format a preview for a terminal, with label tokens in 【】 and truncated tokens in ⟦⟧."""
    lines: list[str] = []
    places: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        number = places.setdefault((row.get("source", ""), row["place"]), len(places) + 1)
        head = f"--- {number}: {row['place']}"
        if result["task"] in _WITHOUT_TOKENS:
            shape = f", {' × '.join(map(str, row['shape']))}" if "shape" in row else ""
            lines.append(f"{head}: label {row['label']}{shape}")
            lines += [f"    {field['name']}: {field['value']}" for field in row.get("fields", ())]
            continue
        counts = f"{row['num_tokens']:,} tokens"
        if result["task"] not in ROLLOUT_TASKS:
            counts += f", {row['label_tokens']:,} with loss, {row['cut_tokens']:,} cut"
        kind = ", ".join(filter(None, (row["format"] or "no format", row.get("answer"))))
        lines.append(f"{head} ({kind}): {row['reason'] or counts}")
        if row["segments"]:
            lines.append("".join(map(_marked, row["segments"])))
    if result["task"] in ROLLOUT_TASKS:
        lines += ["", "These are prompts, for which the run generates completions."]
    elif result["task"] not in _WITHOUT_TOKENS:
        lines += ["", "【label tokens】 carry loss, ⟦cut tokens⟧ are not trained on."]
    return "\n".join(lines)


def _marked(segment: Segment) -> str:
    if segment["cut"]:
        return f"⟦{segment['text']}⟧"
    return f"【{segment['text']}】" if segment["label"] else segment["text"]

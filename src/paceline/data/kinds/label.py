"""Labeled texts: a text, or a pair of texts, with its classes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.kinds.base import TOO_LONG, Encoded, KindSetup, RowCounts, SampleKind
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.sources.rows import MalformedRow, Row, Unsupported, is_missing
from paceline.data.text.chats.turns import unpack_list
from paceline.data.text.columns import CHAT, Tally, check_columns, mapping_of, rename_columns
from paceline.data.text.messages import MessageReader, read_text
from paceline.data.text.token_columns import CategoryColumn, Column, Label
from paceline.data.text.token_dataset import TokenDataset, TokenSample

#: Accepted names of each column, the usual one first.
_TEXT = ("text", "sentence", "content", "document", "review", "query", "question", "prompt")
_PAIRS = (
    ("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("text_a", "text_b"), ("query", "passage"),
    ("question", "sentence"), ("sentence", "sentence_pair"), ("question", "context"),
    ("question", "passage"), ("question", "answer"), ("query", "document"), ("prompt", "response"),
    ("prompt", "completion"), ("instruction", "output"),
)  # fmt: skip
_LABELS = ("label", "labels", "class", "category")
_EXPECTED = {*_TEXT, *_LABELS, *CHAT, *(name for pair in _PAIRS for name in pair)}
_FORMATS = {
    "text": "text (or sentence), label",
    "pair": "text, text_pair (or sentence1, sentence2; premise, hypothesis), label",
    "messages": "messages: a list of {role, content}, label",
}
#: Why a row is dropped whose label is a negative number: usually it stands for a missing label.
NEGATIVE_LABEL = "negative label; `classify.labels` makes it a class if it lists it"
#: The classes of data whose labels are -1 and 1, or only one of them.
SIGNED_CLASSES = ("-1", "1")
#: More classes than this are identifiers rather than classes.
_MAX_CLASSES = 100_000


#: The classes of a sample.
LABELS = CategoryColumn("label")


class LabeledSample(TokenSample):
    """A text with its classes, int64 [labels]. ``labels_mask`` is true for the tokens of the second
    text of a pair."""

    classes: np.ndarray


@dataclass
class LabeledText:
    """A row with labels.

    Args:
        texts: a text, or a pair of texts.
        has_list: the labels are a list, of any length.
    """

    texts: tuple[str, ...]
    labels: tuple[Label, ...]
    has_list: bool = False


@dataclass
class LabelConverter:
    """Convert the rows of one source to labeled texts.

    Args:
        label: the name of the source, for messages.
        columns: `{expected name: name in the data}`.
        ignore_columns: columns to ignore.
        classes: the classes that the config lists; negative numbers are labels only if they are
            among them.
        tally: counts the formats and the columns of the rows.
    """

    label: str
    columns: dict[str, str] = field(default_factory=dict)
    ignore_columns: Collection[str] = ()
    classes: Collection[str] = ()
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        check_columns(self.label, self.columns, self.ignore_columns, _EXPECTED)
        self._read = MessageReader({}, {}, self.ignore_columns, lambda name: True, self.tally)

    def __call__(self, row: Any) -> LabeledText:
        """Convert one row.

        Raises:
            MalformedRow: the row cannot be used.
            Unsupported: the labels are not classes.
        """
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        row = rename_columns(row, self.columns, self.ignore_columns, self.tally)
        label = _first(row, _LABELS)
        kind, texts = _texts_of(row)
        if label is None or kind is None:
            self.tally.unmatched[tuple(map(str, row))] += 1
            raise MalformedRow("columns match no format")
        self.tally.seen[kind] += 1
        self.tally.unused.update(
            name for name in row if name not in (*texts, label) and not is_missing(row[name])
        )
        labels, has_list = self._read_labels(row[label])
        if kind == "messages":
            return LabeledText((self._joined(row[texts[0]]),), labels, has_list)
        names = zip(texts, ("text", "text_pair"), strict=False)
        read = tuple(read_text(row, (column,), name) for column, name in names)
        return LabeledText(read, labels, has_list)

    def _read_labels(self, value: Any) -> tuple[tuple[Label, ...], bool]:
        """Return the labels of a row, and whether it may have several."""
        values = value if isinstance(value, list) else [value]
        if len(values) > 2 and set(map(_read_label, values)) == {0, 1}:
            raise Unsupported(
                "the labels of a row are a 0 or 1 for each class",
                allowed="a list of the classes of the row, as numbers or texts",
                fix="write the list of the classes that have a 1",
            )
        labels = tuple(dict.fromkeys(map(_read_label, values)))
        for label in labels:
            if _is_negative(label) and str(label) not in self.classes:
                raise MalformedRow(NEGATIVE_LABEL)
        return labels, isinstance(value, list)

    def _joined(self, messages: Any) -> str:
        """Return the text of a chat: the contents of its turns on separate lines."""
        turns = unpack_list(messages)
        if not isinstance(turns, list):
            raise MalformedRow("messages are not a list")
        texts = [message["content"] for message in self._read(turns).messages]
        if not texts or not all(text.strip() for text in texts):
            raise MalformedRow("empty text")
        return "\n".join(texts)


class LabelKind(SampleKind):
    """Labeled texts, encoded as the tokenizer does for sequence classification: with its special
    tokens, and its way to join two texts."""

    columns: ClassVar[Sequence[Column]] = (LABELS,)
    formats = _FORMATS
    mapping = mapping_of("text", "label")

    def __init__(self, setup: KindSetup) -> None:
        super().__init__(setup)
        #: Longer texts are truncated to this number of tokens, the longer text of a pair first.
        self.truncate_to = None if self.drops_overlong else self.config.train_args.max_length

    # -- rows
    def open(self, source: ResolvedSource) -> None:
        spec, classes = source.spec, self.config.classify.labels
        self._converter = LabelConverter(
            source.label, spec.columns, spec.ignore_columns, classes, self.tally
        )

    def convert(self, row: Any) -> LabeledText:
        return self._converter(row)

    # -- tokens
    def encode(self, samples: list[LabeledText]) -> list[Encoded | str]:
        """Return the tokens of each sample. ``labels_mask`` is true for the tokens of the
        second text."""
        encode = self._encode_python if self.tokenizer.backend is None else self._encode_batch
        results: list[Encoded | str] = []
        for sample, (ids, types, is_truncated) in zip(samples, encode(samples), strict=True):
            part = self.tokenizer.added_once(ids)
            labels = list(sample.labels) if sample.has_list else sample.labels[0]
            encoded = Encoded(
                np.array(ids[part], dtype=np.int32),
                np.array(types[part], dtype=np.int8) > 0,
                {"label": labels, "is_truncated": is_truncated},
            )
            results.append(encoded if ids else "no tokens")
        return results

    def _encode_batch(self, samples: list[LabeledText]) -> list[tuple[list[int], list[int], bool]]:
        backend = self.tokenizer.backend
        if self.truncate_to is not None:
            backend.enable_truncation(self.truncate_to)
        texts = [sample.texts if len(sample.texts) == 2 else sample.texts[0] for sample in samples]
        encodings = backend.encode_batch(texts)
        return [
            (encoding.ids, encoding.type_ids, bool(encoding.overflowing)) for encoding in encodings
        ]

    def _encode_python(
        self, samples: list[LabeledText]
    ) -> Iterable[tuple[list[int], list[int], bool]]:
        for sample in samples:
            full = self.tokenizer.python(*sample.texts, return_token_type_ids=True)
            length = len(full["input_ids"])
            is_truncated = self.truncate_to is not None and length > self.truncate_to
            if is_truncated:
                full = self.tokenizer.python(
                    *sample.texts,
                    truncation=True,
                    max_length=self.truncate_to,
                    return_token_type_ids=True,
                )
            yield list(full["input_ids"]), list(full["token_type_ids"]), is_truncated

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Yield a text unless it is too long: the tokenizer truncates, unless longer texts are
        dropped. The tokens of a text need no loss."""
        length = len(encoded.input_ids)
        if self.max_length is not None and length > self.max_length:
            counts.note_overlong(length)
            counts.drop(TOO_LONG, place)
            return
        counts.kept += 1
        counts.truncated += encoded.values["is_truncated"]
        yield encoded


@dataclass
class ClassTransform:
    """Convert the stored labels of a sample to its ``classes``.

    Args:
        numbers: the class of each label of the entry.
    """

    numbers: Sequence[int]

    def __call__(self, sample: Any, index: int, dataset: TokenDataset) -> LabeledSample:
        numbers = np.asarray(self.numbers, dtype=np.int64)
        sample["classes"] = numbers[sample.pop("label")]
        return sample  # type: ignore[no-any-return]


def _texts_of(row: Row) -> tuple[str | None, tuple[str, ...]]:
    """Return the format that matches the columns, and the columns of its texts."""
    present = [pair for pair in _PAIRS if all(name in row for name in pair)]
    for pair in present:
        if not any(is_missing(row[name]) for name in pair):
            return "pair", pair
    text, chat = _first(row, _TEXT), _first(row, CHAT)
    if present and (text is None or text in present[0]):
        return "pair", present[0]
    if text is not None and not (is_missing(row[text]) and chat is not None):
        return "text", (text,)
    return ("messages", (chat,)) if chat is not None else (None, ())


def _first(row: Row, names: Sequence[str]) -> str | None:
    """Return the first of the columns that is not empty, else the first that the row has."""
    present = [name for name in names if name in row]
    filled = (name for name in present if not is_missing(row[name]))
    return next(filled, present[0] if present else None)


def _read_label(value: Any) -> Label:
    if is_missing(value):
        raise MalformedRow("no label")
    if isinstance(value, float):
        if not value.is_integer():
            raise Unsupported(
                f"the label {value:g} is not a class; regression is not supported",
                allowed="an integer, a text, or a list of them",
                fix="divide the values into classes, or write a custom task",
            )
        value = int(value)
    if isinstance(value, int):  # including booleans
        return int(value)
    if not isinstance(value, str) or not value.strip():
        raise MalformedRow("no label")
    return value.strip()


def _is_negative(label: Label) -> bool:
    text = str(label)
    return text.startswith("-") and text[1:].isdecimal()


# -- classes
def have_sign_only(labels: Iterable[Label]) -> bool:
    """Return whether all labels are -1 or 1, so that -1 is a class. Among other labels, it stands
    for a missing label."""
    return set(map(str, labels)) <= set(SIGNED_CLASSES)


@dataclass(frozen=True)
class StoredLabels:
    """The distinct labels of a cache entry, in the order of their numbers there.

    Args:
        is_multi: whether a row may have several classes.
    """

    labels: tuple[Label, ...]
    is_multi: bool

    @property
    def are_numbers(self) -> bool:
        return bool(self.labels) and all(str(label).isdecimal() for label in self.labels)

    def numbers(self, classes: Sequence[str], name: str) -> list[int]:
        """Return the class of each label.

        Args:
            name: config key of the data, for messages.

        Raises:
            ConfigError: a label is not one of the classes.
        """
        index = {text: number for number, text in enumerate(classes)}
        if self.are_numbers and not all(text in index for text in map(str, self.labels)):
            index = {str(number): number for number in range(len(classes))}
        if unknown := [str(label) for label in self.labels if str(label) not in index]:
            raise ConfigError(
                "`{name}` has labels that are not classes of the model: {unknown}",
                code="unknown-label",
                allowed="{classes}{detail}",
                fix="correct the labels, or list all classes in `classify.labels`",
                name=name,
                unknown=", ".join(sorted(unknown)[:5]),
                classes=", ".join(classes[:20]),
                detail=" …" if len(classes) > 20 else "",
            )
        return [index[str(label)] for label in self.labels]


def read_labels(folder: Path) -> StoredLabels:
    """Read the labels of an entry of the token cache."""
    return StoredLabels(*LABELS.names(folder))


def class_names(stored: StoredLabels, known: Sequence[str] = ()) -> list[str]:
    """Return the names of the classes: ``known`` (of the config or the model) if the labels are
    among them; else the numbers from 0 to the highest label, or the sorted texts.

    Raises:
        ConfigError: there is one class, or the labels are not classes.
    """
    if known and _fits(stored, known):
        return list(known)
    if stored.are_numbers:
        highest = max(int(label) for label in stored.labels)
        if highest >= _MAX_CLASSES:
            raise ConfigError(
                "the label {highest} of `dataset` is not a class",
                code="invalid-label",
                allowed="numbers from 0 to {last_max_classes}, or texts",
                fix="name the column of the classes with `columns: {label: YOURS}`",
                highest=f"{highest:,}",
                last_max_classes=f"{_MAX_CLASSES - 1:,}",
            )
        names = [str(number) for number in range(highest + 1)]
    else:
        names = sorted({str(label) for label in stored.labels})
    if len(names) < 2:
        raise ConfigError(
            "the rows of `dataset` have a single class, {names}",
            code="single-label",
            allowed="at least two classes",
            names=", ".join(names) or "none",
        )
    return names


def _fits(stored: StoredLabels, known: Sequence[str]) -> bool:
    if {str(label) for label in stored.labels} <= set(known):
        return True
    return stored.are_numbers and all(int(label) < len(known) for label in stored.labels)

"""What a kind of samples is: its columns, and how a row becomes the tokens of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import JsonValue

from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource
from paceline.core.texts import UserText
from paceline.data.counts import DataCounts
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.sources.rows import BrokenRow, MalformedRow, Row, Unsupported, unsupported_row
from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.columns import Tally, check_columns, rename_columns
from paceline.data.text.token_columns import Column
from paceline.data.text.token_dataset import TokenSample
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

TOO_LONG = UserText("longer than max_length", code="row-too-long")
NO_ANSWER = UserText("no answer left after truncation", code="row-without-answer")
NO_LABELS = UserText("no trainable tokens", code="row-without-labels")
#: Key of the number of pairs whose answers have the same tokens, and of the first of them.
EQUAL_PAIRS = "equal_pairs"


@dataclass
class Encoded:
    """One sample: ``input_ids`` int32 [tokens], ``labels_mask`` bool [tokens].

    Args:
        values: the values of the kind's columns, and what else :meth:`SampleKind.fit` needs.
    """

    input_ids: np.ndarray
    labels_mask: np.ndarray
    values: dict[str, Any] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> Encoded:
        """Return the tokens [start, stop), with the same values."""
        return Encoded(self.input_ids[start:stop], self.labels_mask[start:stop], self.values)


@dataclass
class RowCounts(DataCounts):
    """Row counts, with the place of the first row for each reason to drop it."""

    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: DataCounts) -> None:
        super().add(other)
        self.dropped = Counter(self.dropped)
        if isinstance(other, RowCounts):
            lengths = (self.shortest_overlong, other.shortest_overlong)
            self.shortest_overlong = min((length for length in lengths if length), default=None)
            self.first = {**other.first, **self.first}

    def drop(self, reason: str, place: Place) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def note_overlong(self, length: int) -> None:
        """Note the number of tokens of a sample that is longer than the limit."""
        self.shortest_overlong = min(length, self.shortest_overlong or length)


@dataclass(frozen=True)
class KindSetup:
    """What a process encodes samples with. Picklable.

    Args:
        kind: name of the kind of samples, as for :func:`~paceline.data.kinds.registry.load_kind`.
        folder: the folder of the tokenizer, with the processor of a vision-language model.
        tokenizer: the tokenizer of this process. One that is written in Python is not pickled:
            without it, a process loads it from ``folder``.
        template: source of the chat template, or None.
        for_tools: source of the template for chats with tools, if it is a different one.
        arguments: values of variables that the template reads.
        sources: the settings of each source.
        tools: descriptions of the tools that each prompt offers.
        cuts_documents: whether a document becomes several samples; otherwise it is truncated as
            any other sample.
    """

    config: Config
    kind: str
    folder: Path
    tokenizer: LoadedTokenizer | None = None
    template: str | None = None
    for_tools: str | None = None
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    sources: tuple[DatasetSource, ...] = ()
    cuts_documents: bool = True
    tools: tuple[Row, ...] = ()

    def __getstate__(self) -> object:
        is_python = self.tokenizer is not None and self.tokenizer.python is not None
        return {**self.__dict__, "tokenizer": None if is_python else self.tokenizer}


class SampleKind(ABC):
    """A kind of samples that are tokenized.

    A process has one object for encoding, and :meth:`for_source` returns copies of it that convert
    the rows of one source each.

    Attributes:
        columns: the columns of a sample besides ``input_ids`` and ``labels_mask``.
        expected_columns: the columns that `columns` of a source can name.
        formats: the name and the columns of each format of rows, for error messages.
        mapping: how `columns` of a source names the columns, for error messages.
        has_answers: whether only the answers of a sample carry loss.
        filler: the only sample of a micro-batch of streamed rows that has no usable row.
        template: the chat template, or None.
        tally: counters for messages.
        max_length, drops_overlong: the limit of a sample in tokens, if any, and whether longer ones
            are dropped.
    """

    columns: ClassVar[Sequence[Column]] = ()
    expected_columns: ClassVar[Collection[str]] = ()
    formats: ClassVar[Mapping[str, str]] = {}
    mapping: ClassVar[Mapping[str, str]] = {}
    has_answers: ClassVar[bool] = False
    filler: ClassVar[Any] = TokenSample(
        input_ids=np.zeros(2, dtype=np.int32), labels_mask=np.ones(2, dtype=np.bool_)
    )
    template: ChatTemplate | None = None

    def __init__(self, setup: KindSetup) -> None:
        self.setup, self.config = setup, setup.config
        args, trusts = setup.config.train_args, setup.config.trust_remote_code
        self.tokenizer = setup.tokenizer or load_tokenizer(setup.folder, trusts)
        self.max_length = args.max_sample_length
        self.drops_overlong = args.truncation_strategy == "drop"
        self.tally = Tally()

    # -- rows
    def for_source(self, source: ResolvedSource) -> Self:
        """Return the kind for the rows of one source.

        Raises:
            ConfigError: the settings of the source are invalid.
        """
        kind = copy(self)
        kind.tally = Tally()
        kind.open(source)
        return kind

    def open(self, source: ResolvedSource) -> None:
        """Prepare for the rows of a source."""
        self._spec = source.spec
        check_columns(
            source.label, self._spec.columns, self._spec.ignore_columns, self.expected_columns
        )

    def renamed(self, row: Any) -> Row:
        """Return a row under the expected names, without the columns to ignore.

        Raises:
            MalformedRow: the row has no columns.
        """
        if not isinstance(row, dict):
            raise MalformedRow("not an object with columns")
        return rename_columns(row, self._spec.columns, self._spec.ignore_columns, self.tally)

    def read(self, row: Any, place: Place) -> Any:
        """Convert a row of a source, which may be broken.

        Raises:
            MalformedRow: the row cannot be used.
            ConfigError: the dataset needs another kind of training.
        """
        if isinstance(row, BrokenRow):
            raise MalformedRow(row.reason)
        try:
            return self.convert(row)
        except Unsupported as error:
            raise unsupported_row(error, place) from None

    @abstractmethod
    def convert(self, row: Any) -> Any:
        """Return the content of a row, in the form that :meth:`encode` takes.

        Raises:
            MalformedRow: the row cannot be used; it is dropped and counted under this reason.
            Unsupported: the dataset needs another kind of training.
        """

    # -- tokens
    @abstractmethod
    def encode(self, samples: list[Any]) -> list[Encoded | str]:
        """Return the tokens of each sample, or the reason why it is dropped. Called with many
        samples, because tokenizers are fast with batches.

        Args:
            samples: results of :meth:`convert`.
        """

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Yield what is stored of a sample, and count it: the sample, if necessary truncated, or
        nothing if it is dropped."""
        length = len(encoded.input_ids)
        if not encoded.labels_mask[1:].any():
            counts.drop(NO_LABELS, place)
            return
        if self.max_length is not None and length > self.max_length:
            counts.note_overlong(length)
            if self.drops_overlong:
                counts.drop(TOO_LONG, place)
                return
            encoded = encoded.part(0, self.max_length)
            if not encoded.labels_mask[1:].any():
                counts.drop(NO_ANSWER, place)
                return
            counts.truncated += 1
        counts.kept += 1
        yield encoded

    def sequences(self, encoded: Encoded) -> list[tuple[str, Encoded]]:
        """Return the sequences of tokens in a sample, with their names, for a preview."""
        return [("", encoded)]

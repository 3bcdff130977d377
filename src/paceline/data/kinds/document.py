"""Documents: every token of a text carries loss, and long documents are cut into samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.data.kinds.base import Encoded, KindSetup, RowCounts, SampleKind
from paceline.data.sources.resolve import Place, ResolvedSource
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.columns import FORMATS, mapping_of
from paceline.data.text.formats import RowConverter
from paceline.data.text.sample import ChatSample
from paceline.data.text.token_columns import Column
from paceline.data.text.token_dataset import LOSS_WEIGHTS

#: Documents are tokenized in pieces of about this many characters, split at line ends, to bound
#: memory use.
_PIECE_CHARS = 1 << 18
_PIECES_PER_BATCH = 32
#: A piece is tokenized after up to this many characters of the piece before.
_CONTEXT_CHARS = 64
#: Two lines, to find out whether a tokenizer gives the same tokens for each of them alone.
_LINES = ("One two\n", "three four")


#: Tokenizes the contents of several samples.
Encoder = Callable[[list[Any]], list[Encoded]]


class DocumentKind(SampleKind):
    """Texts, and rows of other formats as the text that the chat template makes of them."""

    columns: ClassVar[Sequence[Column]] = (LOSS_WEIGHTS,)
    formats = FORMATS
    mapping = mapping_of("prompt", "completion")
    template_class: ClassVar[type[ChatTemplate]] = ChatTemplate
    #: Converts the rows of a source.
    converter: ClassVar[Callable[..., Any]] = RowConverter

    def __init__(self, setup: KindSetup) -> None:
        super().__init__(setup)
        if setup.template:
            self.template = self.template_class(
                setup.template,
                self.tokenizer.special_tokens,
                setup.for_tools,
                self.tokenizer.control_tokens,
                setup.arguments,
            )

    # -- rows
    def open(self, source: ResolvedSource) -> None:
        spec = source.spec
        self._converter = self.converter(
            source.label,
            spec.format,
            spec.columns,
            self.config.system,
            pretrain=not self.has_answers,
            ignore_columns=spec.ignore_columns,
            roles=spec.roles,
            template=self.template,
            tally=self.tally,
        )

    def convert(self, row: Any) -> Any:
        return self._converter(row)

    # -- tokens
    def encode(self, samples: list[ChatSample]) -> list[Encoded | str]:
        results: dict[int, Encoded | str] = {}
        groups: dict[Encoder, list[tuple[int, Any]]] = defaultdict(list)
        for index, sample in enumerate(samples):
            self.tally.facts["trailing_turns"] += sample.trailing_turns > 0
            try:
                prepared = self._prepare(sample)
            except TemplateRefused as error:
                self.tally.refusals[str(error).splitlines()[0][:200]] += 1
                prepared = "rejected by the chat template"
            if isinstance(prepared, str):
                results[index] = prepared
            else:
                groups[prepared[0]].append((index, prepared[1]))
        for encode, group in groups.items():
            encoded = encode([content for _, content in group])
            results.update(zip((index for index, _ in group), encoded, strict=True))
        for index, result in results.items():
            if isinstance(result, Encoded):
                result.values["weight"] = samples[index].weight
        return [results[index] for index in range(len(samples))]

    def _prepare(self, sample: ChatSample) -> tuple[Encoder, Any] | str:
        """Return the function that tokenizes a sample together with others, and what it takes of
        the sample; or why the sample is dropped.

        Raises:
            TemplateRefused: the chat template raised an error.
        """
        return self._encode_texts, (self._as_text(sample), True)

    def _as_text(self, sample: ChatSample) -> str:
        if sample.text is not None:
            if sample.is_document:
                return sample.text
            return self.tokenizer.without_space_after_end(sample.text)
        if self.template is not None and sample.messages is not None:
            template = self.template.with_arguments(sample.template_arguments)
            return template.render(sample.messages, tools=sample.tools)
        messages = sample.messages or []
        return "\n\n".join(sample.pair or [message["content"] for message in messages])

    def _encode_texts(self, texts: list[tuple[str, bool]]) -> list[Encoded]:
        """Encode texts, some of them documents. Short texts are tokenized in one call."""
        short = [text for text, _ in texts if len(text) <= _PIECE_CHARS]
        tokens = iter(self.tokenizer.encode_batch(short, add_special_tokens=False))
        samples = []
        for text, is_document in texts:
            if len(text) <= _PIECE_CHARS:
                ids = next(tokens)
            else:
                ids = [token for piece in self._encode_pieces(_pieces(text)) for token in piece]
            ids = [*self.tokenizer.missing_start(ids), *ids, *self._missing_end(ids)]
            array = np.array(ids, dtype=np.int32)
            has_loss = np.ones(len(array), dtype=np.bool_)
            samples.append(Encoded(array, has_loss, {"is_document": is_document}))
        return samples

    def _encode_pieces(self, pieces: list[str]) -> Iterator[list[int]]:
        """Yield the ids of each piece. The tokenizer encodes several pieces at a time, on all
        cores."""
        contexts = [""] * len(pieces)
        if not self._splits_at_lines:
            contexts[1:] = [_last_line(piece) for piece in pieces[:-1]]
        for first in range(0, len(pieces), _PIECES_PER_BATCH):
            part = slice(first, first + _PIECES_PER_BATCH)
            batch = list(zip(contexts[part], pieces[part], strict=True))
            ids = self._encode([context + piece for context, piece in batch])
            starts = self._encode([context for context, _ in batch])
            for (_, piece), tokens, start in zip(batch, ids, starts, strict=True):
                is_prefix = tokens[: len(start)] == start
                yield tokens[len(start) :] if is_prefix else self._encode([piece])[0]

    @property
    def _splits_at_lines(self) -> bool:
        """Whether the tokenizer gives each line the same tokens alone as after another line.
        Tokenizers of the SentencePiece type write a space before a text."""
        full, first, second = self._encode(["".join(_LINES), *_LINES])
        return full == first + second

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def _missing_end(self, ids: list[int]) -> list[int]:
        self.tally.facts["no_eos"] += self.tokenizer.eos_token_id is None
        return self.tokenizer.missing_end(ids)

    def fit(self, encoded: Encoded, counts: RowCounts, place: Place) -> Iterator[Encoded]:
        """Cut a document into consecutive samples, the last one shorter. A single token is dropped,
        because it has nothing to predict."""
        if not (encoded.values.get("is_document") and self.setup.cuts_documents):
            yield from super().fit(encoded, counts, place)
            return
        length = len(encoded.input_ids)
        limit = self.max_length or max(1, length)
        counts.kept += 1
        self.tally.facts["documents_cut"] += length > limit
        for start in range(0, length, limit):
            part = encoded.part(start, start + limit)
            if len(part.input_ids) < 2:
                self.tally.facts["lone_tokens"] += 1
            else:
                yield part


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = _line_start(text, start, start + _PIECE_CHARS)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _line_start(text: str, start: int, end: int) -> int:
    """Return the start of the last line in ``text[start:end]``, or else of the last word; ``end``
    if there is none. A line that begins with a character is preferred to one that begins with a
    space: a token may have the line end and the space."""
    last = place = text.rfind("\n", start, end) + 1
    if last <= start:
        space = text.rfind(" ", start, end)
        return space if space > start else end
    while place > start and text[place : place + 1].isspace():
        place = text.rfind("\n", start, place - 1) + 1
    return place if place > start else last


def _last_line(piece: str) -> str:
    """Return the end of a piece, with the line end that it ends with."""
    tail = piece[-_CONTEXT_CHARS:]
    return tail[tail[:-1].rfind("\n") + 1 :]

"""Tokenize entire texts, and find the tokens of parts of them.

A text is never tokenized in parts: tokenizers of the SentencePiece type write a space before each
part, and tokens may span two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from paceline.data.text.chat_template import Span
from paceline.data.text.tokenizer import LoadedTokenizer


class TokenizedText(Protocol):
    """A text as token ids, without the tokenizer's special tokens."""

    @property
    def ids(self) -> list[int]: ...

    def token_at(self, char: int) -> int:
        """Return the first token that contains the character with this index, or the first one
        after it."""

    def tokens_of(self, span: Span) -> tuple[int, int]:
        """Return the first token that overlaps the characters [start, end), and one past the
        last."""


def tokenize(tokenizer: LoadedTokenizer, texts: list[str]) -> list[TokenizedText]:
    """Tokenize texts, all in one call if the tokenizer has a Rust backend."""
    if tokenizer.backend is None:
        ids = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            _TextWithoutOffsets(tokenizer, text, tokens)
            for text, tokens in zip(texts, ids, strict=True)
        ]
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [
        _TextWithOffsets(encoding, len(text))
        for text, encoding in zip(texts, encodings, strict=True)
    ]


@dataclass
class _TextWithOffsets:
    """A text whose tokens have offsets: the Rust tokenizer's ``encoding``."""

    encoding: Any
    num_chars: int

    @property
    def ids(self) -> list[int]:
        return self.encoding.ids  # type: ignore[no-any-return]

    def token_at(self, char: int) -> int:
        # Characters that the tokenizer drops (some drop spaces) belong to no token. Use the next
        # character that does.
        for index in range(char, self.num_chars):
            token = self.encoding.char_to_token(index)
            if token is not None:
                return int(token)
        return len(self.encoding)

    def tokens_of(self, span: Span) -> tuple[int, int]:
        start, end = span
        first, past = self.token_at(start), self.token_at(end)
        if past < len(self.encoding):
            token_start, _ = self.encoding.token_to_chars(past)
            past += token_start < end  # a token that extends past the end
        return first, past


@dataclass
class _TextWithoutOffsets:
    """A text of a tokenizer that is written in Python, whose tokens have no offsets.

    The tokens before a character are those that the text has in common with the text up to this
    character, as in TRL. Tokenizing the text since the last such character is enough if it gives
    the same tokens as the entire text.
    """

    tokenizer: LoadedTokenizer
    text: str
    ids: list[int]
    _known: dict[int, tuple[int, bool]] = field(default_factory=lambda: {0: (0, True)})

    def token_at(self, char: int) -> int:
        return self._before(char)[0]

    def tokens_of(self, span: Span) -> tuple[int, int]:
        first, _ = self._before(span[0])
        past, is_exact = self._before(span[1])
        return first, min(len(self.ids), past + (not is_exact))

    def _before(self, char: int) -> tuple[int, bool]:
        """Return the number of tokens before a character, and whether none extends past it."""
        if char >= len(self.text):
            return len(self.ids), True
        if char not in self._known:
            known = max(
                place for place, (_, is_exact) in self._known.items() if is_exact and place < char
            )
            start = self._known[known][0]
            part = self._encode(self.text[known:char])
            if self.ids[start : start + len(part)] == part:
                self._known[char] = start + len(part), True
            else:
                part = self._encode(self.text[:char])
                pairs = takewhile(
                    lambda pair: pair[0] == pair[1], zip(part, self.ids, strict=False)
                )
                shared = sum(1 for _ in pairs)
                self._known[char] = shared, shared == len(part)
        return self._known[char]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

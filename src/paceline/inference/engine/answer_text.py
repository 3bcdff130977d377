"""The text of an answer, token by token: only whole characters, without special tokens, and nothing
of a text that ends the answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

from paceline.inference.engine.engine import AnswerPart, GeneratedToken

#: Stands for bytes that are not, or not yet, a character.
_INCOMPLETE = "\ufffd"


class AnswerDecoder:
    """Turns tokens into the parts of an answer.

    Args:
        tokenizer: tokenizer of transformers.
        end_ids: tokens that end the answer, which are not part of it.
        stop: texts that end the answer, which does not contain them.
        kept_tokens: texts of special tokens that the text contains.

    Attributes:
        is_stopped: whether an end token or a stop text was generated.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        kept_tokens: Collection[str] = (),
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self._stop = [text for text in stop if text]
        self._hidden = _special_ids(tokenizer, kept_tokens)
        self.is_stopped = False
        self._ids: list[int] = []
        # Tokens from `_start` on are decoded together; those before `_end` have been output.
        self._start = self._end = 0
        self._held = ""
        self._num_emitted = self._num_decoded = 0
        self._tokens: list[tuple[int, GeneratedToken]] = []

    def push(self, token: GeneratedToken) -> AnswerPart | None:
        """Take the next token. Return the part of the answer that is now known, if any."""
        if token.id in self._end_ids:
            self.is_stopped = True
            return None
        self._tokens.append((self._num_decoded, token))
        if token.id in self._hidden:
            return None
        self._ids.append(token.id)
        return self._take(self._decode(is_end=False))

    def finish(self) -> AnswerPart | None:
        """Return the rest of the answer, if any."""
        rest = "" if self._is_cut else self._decode(is_end=True)
        part = self._take(rest)
        text = "" if self._is_cut else self._held
        self._held = ""
        tokens = self._released(None)
        if part is not None:
            text, tokens = part.text + text, [*part.tokens, *tokens]
        return AnswerPart(text, tokens) if text or tokens else None

    _is_cut = False

    def _decode(self, is_end: bool) -> str:
        before = self._text(self._start, self._end)
        text = self._text(self._start, len(self._ids))
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not is_end):
            return ""
        self._start, self._end = self._end, len(self._ids)
        self._num_decoded += len(text) - len(before)
        return text[len(before) :]

    def _text(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False))

    def _take(self, text: str) -> AnswerPart | None:
        """Add text. Return what cannot become a part of a stop text any more."""
        if self._is_cut or not text:
            return None
        self._held += text
        at = min((at for each in self._stop if (at := self._held.find(each)) >= 0), default=None)
        if at is not None:
            self.is_stopped = self._is_cut = True
            text = self._held[:at]
            cut = self._num_emitted + at
            self._tokens = [entry for entry in self._tokens if entry[0] < cut]
            self._held = ""
        else:
            kept = _pending(self._held, self._stop)
            text = self._held[: len(self._held) - kept]
            self._held = self._held[len(text) :]
        self._num_emitted += len(text)
        tokens = self._released(self._num_emitted if self._held else None)
        return AnswerPart(text, tokens) if text else None

    def _released(self, before: int | None) -> list[GeneratedToken]:
        """Return the tokens that begin before a position of the text, or all of them."""
        released = [token for start, token in self._tokens if before is None or start < before]
        self._tokens = self._tokens[len(released) :]
        return released


def _pending(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` with which a stop text begins."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next(
        (
            length
            for length in range(longest, 0, -1)
            if any(each.startswith(text[-length:]) for each in stop)
        ),
        0,
    )


def _special_ids(tokenizer: Any, kept: Collection[str]) -> frozenset[int]:
    """Return the ids of the special tokens that texts do not contain."""
    added = tokenizer.added_tokens_decoder
    ids = {id for id, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    return frozenset(id for id in ids if tokenizer.convert_ids_to_tokens(id) not in kept)


class TokenSpelling:
    """The text and the bytes of single tokens.

    Args:
        tokenizer: tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, id: int) -> str:
        """Return the text of a token; parts of characters are replaced."""
        return self.bytes(id).decode("utf-8", "replace")

    def bytes(self, id: int) -> bytes:
        """Return the bytes that a token stands for."""
        token = self._tokenizer.convert_ids_to_tokens(id)
        if token is None:
            return b""
        if id in self._added:
            return str(token).encode()
        if self._has_bytes_as_letters:
            with_bytes = [self._byte_of.get(letter) for letter in token]
            if None not in with_bytes:
                return bytes(value for value in with_bytes if value is not None)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        if token.startswith("▁"):  # the mark of SentencePiece for a space
            return f" {token[1:].replace('▁', ' ')}".encode()
        return str(self._tokenizer.decode([id])).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _has_bytes_as_letters(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return False
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        parts = [decoder, *(decoder.get("decoders") or [])]
        return any(part.get("type") == "ByteLevel" for part in parts)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return {letter: byte for byte, letter in letters_of_bytes()}


def letters_of_bytes() -> Iterator[tuple[int, str]]:
    """Yield the letter by which byte-level tokenizers write each byte (Radford et al., "Language
    Models are Unsupervised Multitask Learners", 2019)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in shown:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + others)
            others += 1

"""Samples to token ids with the mask of those that carry loss, in batches through the Rust
tokenizer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.chat_names import TEMPLATE_NAMES
from paceline.core.errors import ConfigError
from paceline.data.text.chat_template import ChatTemplate, Rendered, Span, TemplateRefused
from paceline.data.text.formats import Sample, as_chat
from paceline.data.text.tokenizer import LoadedTokenizer

#: A document is tokenised in pieces of about this many characters, cut at line ends, so that memory
#: stays small.
_PIECE_CHARS = 1 << 18
_PIECES_AT_A_TIME = 32
#: How many tokens from the end of a turn its end-of-turn token is looked for; those after it are
#: white space.
_END_TOKENS = 8


@dataclass
class Encoded:
    """One sample: ``input_ids`` int32 [tokens], ``labels_mask`` bool [tokens]. ``is_document``: to
    be cut, never truncated. ``excluded_turns``: assistant turns on which the loss is switched off.
    """

    input_ids: np.ndarray
    labels_mask: np.ndarray
    is_document: bool = False
    excluded_turns: int = 0


@dataclass
class Encoder:
    """Encodes samples for one task.

    Args:
        tokenizer: see :func:`paceline.data.text.tokenizer.load_tokenizer`.
        template: the chat template, or None.
        pretrain: every sample is text, and every token carries loss.
        train_on_inputs: every token carries loss, but those of turns that the data switches off.
        last_turn_only: of a chat's assistant turns only the last one carries loss.
        system: system message put before prompts and completions that become chats.

    Attributes:
        facts: counted things that the person should know.
        refusals: what the template said, with how often.
    """

    tokenizer: LoadedTokenizer
    template: ChatTemplate | None
    pretrain: bool = False
    train_on_inputs: bool = False
    last_turn_only: bool = False
    system: str | None = None
    facts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def __call__(self, samples: list[Sample]) -> list[Encoded | str]:
        """For each sample its tokens, or the reason why it is dropped.

        Raises:
            ConfigError: a chat, and no chat template.
        """
        out: list[Encoded | str | None] = [None] * len(samples)
        chats: list[tuple[int, Rendered]] = []
        pairs: list[tuple[int, tuple[str, str]]] = []
        texts: list[tuple[int, str, bool]] = []
        for index, sample in enumerate(samples):
            if sample.left_off:
                self.facts["left_off"] += 1
            if self.pretrain or sample.text is not None:
                text = self._as_text(sample)
                if text is None:
                    out[index] = "refused by the chat template"
                else:
                    texts.append((index, text, self.pretrain or sample.is_document))
            elif sample.pair is not None and self.template is None:
                pairs.append((index, sample.pair))
            else:
                rendered = self._render(sample)
                if rendered is None:
                    out[index] = "refused by the chat template"
                elif reason := self._without_loss(rendered):
                    out[index] = reason
                else:
                    chats.append((index, rendered))
        for (index, _), one in zip(
            chats, self._encode_chats([rendered for _, rendered in chats]), strict=True
        ):
            out[index] = one
        for (index, _), one in zip(
            pairs, self._encode_pairs([pair for _, pair in pairs]), strict=True
        ):
            out[index] = one
        for index, text, is_document in texts:
            out[index] = self._encode_text(text, is_document)
        return [one if one is not None else "not encoded" for one in out]

    def _render(self, sample: Sample) -> Rendered | None:
        messages = sample.messages if sample.messages is not None else as_chat(sample, self.system)
        if self.template is None:
            raise no_chat_template()
        off = sample.off
        if self.last_turn_only:
            answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
            off = off.union(answers[:-1])
        self.facts["other_template"] += (
            self.template.chosen(messages, sample.tools) is not self.template
        )
        try:
            rendered = self.template.answers(messages, sample.tools, off)
        except TemplateRefused as error:
            self.refusals[str(error).splitlines()[0][:200]] += 1
            return None
        if rendered.unplaced:
            self.facts["unplaced"] += rendered.unplaced
        return rendered

    def _without_loss(self, rendered: Rendered) -> str | None:
        """Why a chat with turns that carry no loss cannot be used, or None."""
        if not rendered.excluded_turns:
            return None
        if self.train_on_inputs:
            is_whole = len(rendered.excluded) >= rendered.excluded_turns
            return (
                None
                if is_whole
                else "a turn without loss cannot be found in the text of the chat template"
            )
        return (
            None
            if rendered.spans or rendered.unplaced
            else "the loss is switched off for every turn"
        )

    def _as_text(self, sample: Sample) -> str | None:
        if sample.text is not None:
            return sample.text
        if self.template is not None and sample.messages is not None:
            try:
                return self.template.render(sample.messages, tools=sample.tools)
            except TemplateRefused as error:
                self.refusals[str(error).splitlines()[0][:200]] += 1
                return None
        parts = (
            sample.pair
            if sample.pair is not None
            else [one["content"] for one in sample.messages or []]
        )
        return "\n\n".join(parts)

    # -- tokens
    def _encode_chats(self, chats: list[Rendered]) -> list[Encoded]:
        backend = self.tokenizer.backend
        if backend is None:
            return [self._by_segments(one) for one in chats]
        found = []
        encodings = backend.encode_batch([one.text for one in chats], add_special_tokens=False)
        for chat, encoding in zip(chats, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.bool_)
            for span in chat.spans:
                first, end = _token_span(encoding, span, len(ids), len(chat.text))
                mask[first:end] = True
            self._look_at_end(ids, mask)
            if self.train_on_inputs:
                mask[:] = True
                for span in chat.excluded:
                    first, end = _token_span(encoding, span, len(ids), len(chat.text))
                    mask[first:end] = False
            found.append(Encoded(ids, mask, excluded_turns=chat.excluded_turns))
        return found

    def _by_segments(self, chat: Rendered) -> Encoded:
        """For tokenizers that give no offsets: the text before, in and after each span is tokenised
        on its own."""
        ids: list[int] = []
        kinds: list[int] = []
        cursor = 0
        spans = sorted(
            [*((span, 1) for span in chat.spans), *((span, 2) for span in chat.excluded)]
        )
        for (start, end), kind in [*spans, ((len(chat.text), len(chat.text)), 0)]:
            for text, of_text in ((chat.text[cursor:start], 0), (chat.text[start:end], kind)):
                piece = self._ids(text, add_special_tokens=False)
                ids += piece
                kinds += [of_text] * len(piece)
            cursor = end
        array, mask = np.array(ids, dtype=np.int32), np.array(kinds, dtype=np.int8) == 1
        self._look_at_end(array, mask)
        if self.train_on_inputs:
            mask = np.array(kinds, dtype=np.int8) != 2
        return Encoded(array, mask, excluded_turns=chat.excluded_turns)

    def _look_at_end(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Count the chats whose last labelled turn has no end-of-turn token, white space after it
        aside."""
        for place in np.flatnonzero(mask)[:-_END_TOKENS:-1]:
            token = int(ids[place])
            if token in self.tokenizer.special_ids or token == self.tokenizer.eos_token_id:
                return
            if self.tokenizer.decode([token]).strip():
                self.facts["no_end_of_turn"] += 1
                return

    def _encode_pairs(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Prompt and completion are tokenised apart, as they are when the model is asked: the
        mask's edge is exact."""
        prompts = self.tokenizer.encode_batch(
            [prompt for prompt, _ in pairs], add_special_tokens=True
        )
        answers = self.tokenizer.encode_batch(
            [answer for _, answer in pairs], add_special_tokens=False
        )
        eos = self._eos()
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            while prompt and eos and prompt[-1] == eos[0]:
                prompt = prompt[:-1]
            ids = np.array([*prompt, *answer, *eos], dtype=np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            found.append(Encoded(ids, mask | self.train_on_inputs))
        return found

    def _encode_text(self, text: str, is_document: bool) -> Encoded:
        ids: list[int] = []
        for encoded in self._encode_pieces(_pieces(text)):
            ids += encoded
            if self._eos() and ids and ids[-1:] == self._eos():
                ids.pop()
        ids += self._eos()
        array = np.array(ids, dtype=np.int32)
        return Encoded(array, np.ones(len(array), dtype=np.bool_), is_document)

    def _encode_pieces(self, pieces: list[str]) -> Iterator[list[int]]:
        """The ids of each piece; the tokenizer's own first token (if it has one) is put once, at
        the start. Several pieces at a time: the tokenizer encodes them on all cores."""
        start, has_begun = 0, False
        while start < len(pieces) and not has_begun:
            ids = self._ids(pieces[start], add_special_tokens=True)
            start, has_begun = start + 1, bool(ids)
            yield ids
        for at in range(start, len(pieces), _PIECES_AT_A_TIME):
            yield from self.tokenizer.encode_batch(
                pieces[at : at + _PIECES_AT_A_TIME], add_special_tokens=False
            )

    def _eos(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            self.facts["no_eos"] += 1
            return []
        return [self.tokenizer.eos_token_id]

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if not text:
            return []
        return self.tokenizer.encode_batch([text], add_special_tokens)[0]


def no_chat_template() -> ConfigError:
    """What is said where chats meet a tokenizer without a chat template."""
    return ConfigError(
        "no chat template: the dataset holds chats (or instructions), and the tokenizer does not"
        " say how the model reads one",
        allowed="`chat_template: chatml`, or another of "
        + ", ".join(TEMPLATE_NAMES)
        + ", or a file with a Jinja template",
        fix=(
            "for a base model add `chat_template: chatml`; or give a chat model's tokenizer as"
            " `tokenizer: ...`; or train on plain text with `task: pretrain`, or on a dataset with"
            " prompt and completion"
        ),
    )


def _token_span(encoding: Any, span: Span, num_tokens: int, num_chars: int) -> tuple[int, int]:
    """Tokens that overlap the characters [start, end): the first, and one past the last."""
    start, end = span
    first = _token_at(encoding, start, num_chars)
    past = _token_at(encoding, end, num_chars)
    first, past = (num_tokens if first is None else first), (num_tokens if past is None else past)
    if past < num_tokens:
        begins, _ = encoding.token_to_chars(past)
        past += begins < end  # a token that reaches over the end
    return first, past


def _token_at(encoding: Any, char: int, num_chars: int) -> int | None:
    # Characters that the tokenizer leaves out (some drop blanks) belong to no token: the next one
    # that does is taken.
    while char < num_chars:
        found = encoding.char_to_token(char)
        if found is not None:
            return int(found)
        char += 1
    return None


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = text.rfind("\n", start, start + _PIECE_CHARS) + 1
        end = end if end > start else start + _PIECE_CHARS
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]

"""End-of-turn tokens in rendered chats.

Some templates end the last turn in another way than the turns before: with the end-of-text token
instead of an end-of-turn token, or with no token at all. Then the text up to a turn does not show
how the turn ends in the entire chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

#: A chat that is rendered to find out how turns begin and end.
PROBE = ("first question", "first answer", "second question", "second answer")


@dataclass(frozen=True)
class TurnEnds:
    """How the turns of a template end, found in the rendered chat with the texts of :data:`PROBE`.

    Args:
        tokens: special tokens in the template or in the rendered probe.
        probe: the rendered probe, or its first answer if the template accepts only one; empty if
            it refuses both.
        header: the generation prompt: how an answer begins.
    """

    tokens: frozenset[str]
    probe: str
    header: str

    def end_of(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn, with the end-of-turn token after it if the turn has none yet.

        Args:
            text: the rendered chat.
            start, end: characters of the turn, as far as it is known.
        """
        token, headers = self._end_token
        if not token or text[start:end].rstrip().endswith(self._sorted):
            return end
        match = self._next.match(text, end)
        if match is None or match[1] in headers:
            return end
        following = self._next.match(text, match.end())
        begins_turn = following is not None and following[1] in headers
        if match[1] == token or begins_turn or not text[match.end() :].strip():
            return match.end()
        return end

    def after_header(self, text: str, first: int, content: int) -> int:
        """Return where an answer begins whose content is found: after the longest part of the
        generation prompt in ``text[first:content]`` that has its first token at least."""
        token = self._next.match(self.header) if self.tokens else None
        shortest = token.end() if token else max(1, len(self.header))
        for length in range(len(self.header), shortest - 1, -1):
            if (at := text.rfind(self.header[:length], first, content)) >= 0:
                return at + shared_length(self.header, text[at:])
        return content

    def end_token_of(self, turn: str) -> str:
        """Return the first token after the content of a turn of the probe; empty if there is
        none."""
        tails = (turn.partition(answer)[2] for answer in PROBE[1::2] if answer in turn)
        return next((token for tail in tails for token in self._tokens_of(tail)), "")

    def without_end(self, text: str) -> str:
        """Return a text without the special tokens and the white space that it ends with."""
        while (shorter := text.rstrip()).endswith(self._sorted):
            text = shorter.removesuffix(next(filter(shorter.endswith, self._sorted)))
        return shorter

    @cached_property
    def added(self) -> frozenset[str]:
        """The tokens that the template writes directly after an answer."""
        matches = (
            self._next.match(self.probe, self.probe.find(answer) + len(answer))
            for answer in PROBE[1::2]
            if answer in self.probe
        )
        return frozenset(match[1] for match in matches if match is not None)

    @cached_property
    def before_turns(self) -> frozenset[str]:
        """The tokens before the text of the first question, and the generation prompt's tokens."""
        first = max(0, self.probe.find(PROBE[0]))
        return tokens_in(self.tokens, self.probe[:first], self.header)

    @cached_property
    def _sorted(self) -> tuple[str, ...]:
        return tuple(sorted(self.tokens, key=len, reverse=True))

    @cached_property
    def _next(self) -> re.Pattern[str]:
        return re.compile(rf"\s*({'|'.join(map(re.escape, self._sorted))})")

    @cached_property
    def _end_token(self) -> tuple[str, frozenset[str]]:
        """The end-of-turn token of an answer that a question follows, and the tokens with which
        turns begin. No token if the next turn begins directly, as with the templates of GLM."""
        question, answer, following, _ = PROBE
        first = self.probe.find(question)
        answer_end = self.probe.find(answer, first) + len(answer)
        next_start = self.probe.find(following, answer_end)
        if not self.tokens or first < 0 or answer_end < first or next_start < 0:
            return "", frozenset()
        between = self._tokens_of(self.probe[answer_end:next_start])
        of_answers = self._tokens_of(self.header)
        if not between or between[0] in of_answers:
            return "", frozenset()
        # A token before the first question too, and directly before its text, begins questions.
        begins = self._tokens_of(_shared_end(self.probe[:first], self.probe[answer_end:next_start]))
        if len(between) == 1 and between[0] in begins:
            return "", frozenset()
        return between[0], frozenset({*of_answers, *between[1:]} - {between[0]})

    def _tokens_of(self, text: str) -> list[str]:
        return [match[1] for match in self._next.finditer(text)]


def tokens_in(tokens: Iterable[str], *texts: str) -> frozenset[str]:
    """Return the tokens that occur in one of the texts."""
    return frozenset(token for token in tokens if token and any(token in text for text in texts))


def _shared_end(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[-length - 1] == second[-length - 1]:
        length += 1
    return second[len(second) - length :]


def shared_length(first: str, second: str) -> int:
    """Return the number of characters that two texts begin with."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((number for number, (left, right) in pairs if left != right), shorter)

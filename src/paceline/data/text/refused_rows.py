"""Reject rows that a language model must not be trained on: preference data (DPO, KTO, reward
models), and images, video or audio, which must not be treated as literal text."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from pydantic import JsonValue

from paceline.data.sources.rows import Row, Unsupported, holds_nothing

_ANSWERS = (
    "response",
    "answer",
    "output",
    "completion",
    "text",
    "content",
    "message",
    "messages",
    "conversation",
    "conversations",
    "responses",
)
REJECTED = frozenset({
    "rejected", "reject", "dispreferred", "non_preferred_output",
    *(f"rejected_{name}" for name in _ANSWERS), *(f"{name}_rejected" for name in _ANSWERS),
})  # fmt: skip
CHOSEN = frozenset({
    "chosen", "preferred", "preferred_output",
    *(f"chosen_{name}" for name in _ANSWERS), *(f"{name}_chosen" for name in _ANSWERS),
})  # fmt: skip
#: Columns that mark a single answer as good or bad.
LABELS = frozenset({"label", "kto_tag", "kto_label"})
_LABEL_TEXTS = {"true", "false", "desirable", "undesirable"}
_PROMPTS = ("prompt", "question", "query", "instruction", "problem", "input")
_TWO_ANSWERS = tuple(
    (f"{name}_{first}", f"{name}_{second}")
    for name in ("response", "answer", "output", "completion")
    for first, second in (("0", "1"), ("1", "2"), ("a", "b"), ("j", "k"))
)
_UNSUPPORTED = "the task trains on single answers"
_SINGLE_ANSWER = "rows with one answer each that the model should learn"
_OTHER_TOOL = "train this file with a tool that supports this method"


@dataclass(frozen=True)
class RefusedColumns:
    """The columns whose values may refuse a row. They are found once for rows with the same
    column names, and only their values are looked at in each row.

    Args:
        rejected: columns with a rejected answer.
        labels: columns that may mark an answer as good or bad.
        media: columns with images, videos or audio.
    """

    rejected: tuple[str, ...]
    labels: tuple[str, ...]
    media: tuple[str, ...]

    def check(self, row: Row, has_format: bool, has_answer: bool) -> None:
        """Check the values of a row.

        Args:
            has_format: whether the row matches a format.
            has_answer: whether the row has an answer, which a label would mark.

        Raises:
            Unsupported: the row needs another kind of training.
        """
        if self.rejected:
            _check_pairs(row, self.rejected, has_format)
        for name in self.labels if has_answer else ():
            _check_label(row, name)
        for name in self.media:
            check_column(name, row[name])


def find_refused_columns(names: Collection[object]) -> RefusedColumns | None:
    """Return the columns whose values may refuse a row, or None if there are none."""
    texts = [name for name in names if isinstance(name, str)]
    rejected, labels, media = (
        tuple(name for name in texts if name in group) for group in (REJECTED, LABELS, MEDIA)
    )
    return RefusedColumns(rejected, labels, media) if rejected or labels or media else None


class TextChecks:
    """Refuse texts as :func:`check_text` does. A text that several samples of a row have is
    checked once."""

    def __init__(self) -> None:
        self._checked: set[str] = set()

    def start_row(self) -> None:
        """Forget the texts of the row before."""
        self._checked.clear()

    def __call__(self, text: str) -> None:
        if "<" in text and text not in self._checked:
            self._checked.add(text)
            check_text(text)


def _check_pairs(row: Row, rejected: Collection[str], has_answer: bool) -> None:
    """Reject a row with a rejected answer.

    Args:
        rejected: the row's columns that are in :data:`REJECTED`.
        has_answer: whether the row matches a format without the preference columns.

    Raises:
        Unsupported: one of the columns is not empty.
    """
    bad = [
        name
        for name in rejected
        if isinstance(row[name], str | list | dict) and not holds_nothing(row[name])
    ]
    if not bad:
        return
    good = [name for name in row if name in CHOSEN and not holds_nothing(row[name])]
    is_reward = "margin" in row or not (has_answer or any(name in row for name in _PROMPTS))
    methods = "a reward model, DPO" if is_reward else "DPO"
    raise Unsupported(
        f"the rows are preference pairs ({_names([*good, *bad])}) for {methods} or another method"
        f" of preference training (ORPO, SimPO, CPO); {_UNSUPPORTED}",
        allowed=_SINGLE_ANSWER,
        fix=(
            "set `task: dpo`, `orpo`, `simpo` or `reward`; or"
            f" {_sft_instead(row, good, bad, has_answer)}"
        ),
    )


def _sft_instead(row: Row, good: list[str], bad: list[str], has_answer: bool) -> str:
    """Describe how to fine-tune on only the preferred answers."""
    ignore = f"`ignore_columns: [{', '.join(bad)}]`"
    columns: dict[str, str] = {}
    if not has_answer:
        prompt = next((name for name in _PROMPTS if name in row), None)
        if not good or isinstance(row[good[0]], dict):
            return _OTHER_TOOL
        value = row[good[0]]
        if isinstance(value, list) and (prompt is None or not isinstance(row[prompt], list)):
            columns = {"messages": good[0]}
        elif prompt is None:
            columns = {"text": good[0]}
        elif prompt == "instruction":
            columns = {"output": good[0]}
        else:
            columns = {**({"prompt": prompt} if prompt != "prompt" else {}), "completion": good[0]}
    mapping = ", ".join(f"{expected}: {name}" for expected, name in columns.items())
    settings = (f"`columns: {{{mapping}}}` and " if mapping else "") + ignore
    return f"{_OTHER_TOOL}; to fine-tune on only the preferred answers, set {settings}"


def _check_label(row: Row, name: str) -> None:
    """Reject a row whose single answer is marked as good or bad.

    Raises:
        Unsupported: the column is a boolean.
    """
    value = row[name]
    if isinstance(value, bool) or (
        isinstance(value, str) and value.strip().lower() in _LABEL_TEXTS
    ):
        raise Unsupported(
            f"the rows mark each answer as good or bad (`{name}` is {str(value).lower()}) for KTO;"
            f" {_UNSUPPORTED}",
            allowed=_SINGLE_ANSWER,
            fix=(
                "set `task: kto`, or keep only the rows with good"
                f" answers; if the column means something else, set `ignore_columns: [{name}]`"
            ),
        )


def check_without_format(row: Row) -> None:
    """Reject a row that matches no format because it has several answers.

    Raises:
        Unsupported: the row has several answers.
    """
    for pair in _TWO_ANSWERS:
        if all(not holds_nothing(row.get(name)) for name in pair):
            chosen, rejected = pair
            raise two_answers(_names(pair), f"{{chosen: {chosen}, rejected: {rejected}}}")
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        raise Unsupported(
            "the rows have a label for each step of an answer (`completions`, `labels`) for a"
            f" process reward model (PRM); {_UNSUPPORTED}",
            allowed=_SINGLE_ANSWER,
            fix=_OTHER_TOOL,
        )


def two_answers(where: str, columns: str | None = None) -> Unsupported:
    """Return the error for rows with two answers in ``where``: two columns, or a list in the column
    of the answer, which is an older form of preference pairs.

    Args:
        columns: the value of `columns` for two columns.
    """
    fix = "and write them to the columns `chosen` and `rejected`"
    if columns is not None:
        fix = f"with `columns: {columns}` if the first is the preferred answer"
    return Unsupported(
        f"the rows have two answers each ({where}) for a reward model or DPO; {_UNSUPPORTED}",
        allowed=_SINGLE_ANSWER,
        fix=f"set `task: dpo` or `reward` {fix}; or keep one answer per row",
    )


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- media
#: Columns and keys of a message that contain media.
MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})
#: Types of message parts that are text.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_TEXT_ONLY = "text; `task: sft` and `task: pretrain` train language models on text only"

_TAG = re.compile(r"<(?:image|video|audio)>")
#: Tokens of multimodal models, and numbered placeholders, which do not occur in normal text.
_TOKEN = re.compile(
    r"<\|(?:image|video|audio)(?:_pad|_\d+)?\|>|<\|vision_start\|>|<(?:image|video|audio)["
    r" _]?\d+>|<image_placeholder>"
)
_FILE = re.compile(
    r"<(img|image|video|audio)>\s*(?:https?://[^<>\s]+|[^<>\n]+\.(?:jpe?g|png|gif|webp|bmp|mp[34]|wav|flac|ogg|avi|mov))\s*</\1>",
    re.I,
)
_QUOTED = re.compile(r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"|'<\w+>'|“[^”\n]*”", re.S)
_OTHER_TAG = re.compile(r"</?(?!image>|video>|audio>|think>|/think>)[a-zA-Z][\w-]*[\s/>]|&lt;")
_ABOUT_MARKUP = re.compile(
    r"\b(?:tags?|elements?|html5?|svg|xml|css|jsx|rss|markup|attributes?|nodes?)\b|标签|元素", re.I
)


def check_column(name: str, value: JsonValue) -> None:
    """Reject a column or a key with media.

    Raises:
        Unsupported: the value is not empty.
    """
    if not holds_nothing(value):
        raise Unsupported(
            f"the rows have {_kind(name)} (`{name}`), but the task trains on text only",
            allowed=_TEXT_ONLY,
            fix=(
                f"use a tool that trains vision or audio models, or set `ignore_columns: [{name}]`"
                " to train on only the text"
            ),
        )


def check_text(text: str) -> None:
    """Reject a prompt that contains a placeholder for an image, a video or audio.

    Raises:
        Unsupported: the prompt contains a placeholder.
    """
    placeholder = find_placeholder(text)
    if placeholder is not None:
        name = next((kind for kind in ("video", "audio") if kind in placeholder), "image")
        raise Unsupported(
            f"the rows have placeholders for {_kind(name)} (`{placeholder}`), but the task trains"
            " on text only",
            allowed=_TEXT_ONLY,
            fix=(
                "use a tool that trains vision or audio models, or remove these rows; to train on"
                f" the placeholder as literal text, set `ignore_columns: [{name}s]` or put it in"
                " backticks"
            ),
        )


def find_placeholder(text: str) -> str | None:
    """Return the first placeholder for an image, a video or audio in ``text``, or None.

    ``<image>`` is a placeholder unless the text is about markup: it is quoted, it has a closing
    tag, or it is within a line of a text that has other tags or mentions tags, elements, HTML or
    SVG.
    """
    if "<" not in text:
        return None
    plain = _QUOTED.sub("", text)
    if match := _FILE.search(text) or _TOKEN.search(plain):
        return match[0]
    if _TAG.search(text) is None:
        return None
    for match in _TAG.finditer(plain):
        if f"</{match[0][1:]}" in text:
            continue
        before = plain[: match.start()]
        starts_line = not before.rpartition("\n")[2].strip() and not _OTHER_TAG.search(before)
        if starts_line or not (_ABOUT_MARKUP.search(plain) or _OTHER_TAG.search(plain)):
            return match[0]
    return None


def other_part(kind: JsonValue) -> Unsupported:
    """Return the error for a message part that is not text."""
    return Unsupported(
        f"a message has a part of type `{kind}`, but the task trains on text only",
        allowed=_TEXT_ONLY,
        fix="use a tool that trains vision or audio models, or remove these rows",
    )


def _kind(name: str) -> str:
    return "video" if "video" in name else "audio" if "audio" in name else "images"

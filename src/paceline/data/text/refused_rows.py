"""Recognize rows that a language model must not be trained on: preference data (DPO, KTO, reward
models), and images, video or audio, which it must not see as literal text."""

import re
from collections.abc import Collection

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
    *(f"rejected_{word}" for word in _ANSWERS), *(f"{word}_rejected" for word in _ANSWERS),
})  # fmt: skip
CHOSEN = frozenset({
    "chosen", "preferred", "preferred_output",
    *(f"chosen_{word}" for word in _ANSWERS), *(f"{word}_chosen" for word in _ANSWERS),
})  # fmt: skip
#: Columns that mark a single answer as good or bad.
LABELS = frozenset({"label", "kto_tag", "kto_label"})
_LABEL_WORDS = {"true", "false", "desirable", "undesirable"}
_PROMPTS = ("prompt", "question", "query", "instruction", "problem", "input")
_TWO_ANSWERS = tuple(
    (f"{word}_{first}", f"{word}_{second}")
    for word in ("response", "answer", "output", "completion")
    for first, second in (("0", "1"), ("1", "2"), ("a", "b"), ("j", "k"))
)
_NOT_HERE = "Paceline does not support preference training yet"
_ONE_ANSWER = "rows with one answer each, all of which the model should learn"


def check_pairs(row: Row, rejected: Collection[str], has_answer: bool) -> None:
    """Refuse a row with a rejected answer.

    Args:
        rejected: the row's columns that are in :data:`REJECTED`.
        has_answer: whether the row fits a format without the preference columns.

    Raises:
        Unsupported: one of the columns holds an answer.
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
        f"the rows are preference pairs ({_names([*good, *bad])}): they ask for {methods} or"
        f" another method of preference training (ORPO, SimPO, CPO), and {_NOT_HERE}",
        allowed=_ONE_ANSWER,
        fix=_sft_instead(row, good, bad, has_answer),
    )


def _sft_instead(row: Row, good: list[str], bad: list[str], has_answer: bool) -> str:
    """How to fine-tune on the preferred answers alone."""
    elsewhere = "train this file with a tool that has that method"
    ignore = f"`ignore_columns: [{', '.join(bad)}]`"
    columns: dict[str, str] = {}
    if not has_answer:
        prompt = next((name for name in _PROMPTS if name in row), None)
        if not good or isinstance(row[good[0]], dict):
            return elsewhere
        value = row[good[0]]
        if isinstance(value, list) and (prompt is None or not isinstance(row[prompt], list)):
            columns = {"messages": good[0]}
        elif prompt is None:
            columns = {"text": good[0]}
        elif prompt == "instruction":
            columns = {"output": good[0]}
        else:
            columns = {**({"prompt": prompt} if prompt != "prompt" else {}), "completion": good[0]}
    mapping = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    settings = (f"`columns: {{{mapping}}}` and " if mapping else "") + ignore
    return f"{elsewhere}; to fine-tune on the preferred answers alone, give the source {settings}"


def check_label(row: Row, name: str) -> None:
    """Refuse a row whose single answer is marked as good or bad.

    Raises:
        Unsupported: the column holds a boolean.
    """
    value = row[name]
    if isinstance(value, bool) or (
        isinstance(value, str) and value.strip().lower() in _LABEL_WORDS
    ):
        raise Unsupported(
            f"the rows mark each answer as good or bad (`{name}` is {str(value).lower()}): they ask"
            f" for KTO, and {_NOT_HERE}",
            allowed=_ONE_ANSWER,
            fix=(
                "train this file with a tool that has KTO, or keep only the rows with good"
                f" answers; where the column means something else, set `ignore_columns: [{name}]`"
            ),
        )


def check_without_format(row: Row) -> None:
    """Refuse a row that fits no format because it holds several answers.

    Raises:
        Unsupported: it does.
    """
    two = next(
        (pair for pair in _TWO_ANSWERS if all(not holds_nothing(row.get(name)) for name in pair)),
        None,
    )
    if two is not None:
        raise Unsupported(
            f"the rows hold two answers each ({_names(two)}): they ask for a reward model or DPO,"
            f" and {_NOT_HERE}",
            allowed=_ONE_ANSWER,
            fix="train this file with a tool that has that method, or write one answer a row",
        )
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        raise Unsupported(
            "the rows hold a label for each step of an answer (`completions`, `labels`): they ask"
            f" for a process reward model (PRM), and {_NOT_HERE}",
            allowed=_ONE_ANSWER,
            fix="train this file with a tool that has that method",
        )


def two_outputs(column: str) -> Unsupported:
    """The refusal of a list of two answers in the column of the answer, an older spelling of
    preference pairs."""
    return Unsupported(
        f"the rows hold two answers each (`{column}` is a list of two): they ask for DPO or a"
        f" reward model, and {_NOT_HERE}",
        allowed=_ONE_ANSWER,
        fix="train this file with a tool that has that method, or write one answer a row",
    )


def _names(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- media
#: Columns, and keys of a message, that hold media.
MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})
#: Types of a message's parts that are text.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_TEXT_ALONE = "text; `task: sft` and `task: pretrain` train language models on text alone"

_TAG = re.compile(r"<(?:image|video|audio)>")
#: Tokens of multimodal models, and numbered placeholders. Nobody writes these by accident.
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
    """Refuse a column or a key with media.

    Raises:
        Unsupported: it is not empty.
    """
    if not holds_nothing(value):
        raise Unsupported(
            f"the rows have {_kind(name)} (`{name}`), and the task trains on text alone",
            allowed=_TEXT_ALONE,
            fix=(
                f"use a tool that trains vision or audio models, or set `ignore_columns: [{name}]`"
                " to train on the text alone"
            ),
        )


def check_text(text: str) -> None:
    """Refuse a prompt that has a placeholder of an image, a video or audio in it.

    Raises:
        Unsupported: it has.
    """
    placeholder = find_placeholder(text)
    if placeholder is not None:
        name = next((kind for kind in ("video", "audio") if kind in placeholder), "image")
        raise Unsupported(
            f"the rows have placeholders of {_kind(name)} (`{placeholder}`), and the task trains on"
            " text alone",
            allowed=_TEXT_ALONE,
            fix=(
                "use a tool that trains vision or audio models, or remove these rows; to train on"
                f" the placeholder as it is written, set `ignore_columns: [{name}s]` or put it in"
                " backticks"
            ),
        )


def find_placeholder(text: str) -> str | None:
    """The first placeholder of an image, a video or audio in ``text``, or None.

    ``<image>`` is a placeholder unless the text is about markup: it is quoted, it has a closing
    tag, or it stands inside a line of a text that has other tags or speaks of tags, elements, HTML
    or SVG.
    """
    if "<" not in text:
        return None
    if found := _FILE.search(text) or _TOKEN.search(_QUOTED.sub("", text)):
        return found[0]
    if _TAG.search(text) is None:
        return None
    plain = _QUOTED.sub("", text)
    for found in _TAG.finditer(plain):
        if f"</{found[0][1:]}" in text:
            continue
        starts_line = not plain[: found.start()].rpartition("\n")[2].strip()
        starts_line = starts_line and not _OTHER_TAG.search(plain[: found.start()])
        if starts_line or not (_ABOUT_MARKUP.search(plain) or _OTHER_TAG.search(plain)):
            return found[0]
    return None


def other_part(kind: JsonValue) -> Unsupported:
    """The refusal of a message's part that is not text."""
    fix = "use a tool that trains vision or audio models, or remove these rows"
    return Unsupported(
        f"a message has a part of type `{kind}`, and the task trains on text alone",
        allowed=_TEXT_ALONE,
        fix=fix,
    )


def _kind(name: str) -> str:
    return "video" if "video" in name else "audio" if "audio" in name else "images"

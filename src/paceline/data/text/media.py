"""Recognize rows with images, video or audio, which a language model trained on text must not see
as literal text."""

import re
from typing import Any

from paceline.data.sources.rows import Unsupported, holds_nothing

#: Columns, and keys of a message, that hold media.
MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})
#: Types of a message's parts that are text.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_ALLOWED = "text; `task: sft` and `task: pretrain` train language models on text alone"

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


def check_column(name: str, value: Any) -> None:
    """Refuse a column or a key with media.

    Raises:
        Unsupported: it is not empty.
    """
    if not holds_nothing(value):
        raise Unsupported(
            f"the rows have {_kind(name)} (`{name}`), and the task trains on text alone",
            allowed=_ALLOWED,
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
            allowed=_ALLOWED,
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


def other_part(kind: Any) -> Unsupported:
    """The refusal of a message's part that is not text."""
    fix = "use a tool that trains vision or audio models, or remove these rows"
    return Unsupported(
        f"a message has a part of type `{kind}`, and the task trains on text alone",
        allowed=_ALLOWED,
        fix=fix,
    )


def _kind(name: str) -> str:
    return "video" if "video" in name else "audio" if "audio" in name else "images"

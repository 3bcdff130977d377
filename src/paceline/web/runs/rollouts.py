"""The completions that a run has trained on, from the files in its folder ``rollouts``."""

import os
import re
from pathlib import Path
from typing import Literal, TypedDict

from pydantic_core import from_json

from paceline.core.formatting import finite
from paceline.web.files import JSONObject, as_object, as_text, open_inside

Order = Literal["file", "best", "worst"]

_FILE = re.compile(r"^step-([0-9]{8,15})\.jsonl$")
_MAX_FILES = 2000
_MAX_BYTES = 64 << 20
_MAX_TEXT = 20_000


class ShownCompletion(TypedDict):
    """A completion on the page. ``tokens``: its number of tokens."""

    prompt: float | None
    index: float | None
    prompt_text: str
    completion: str
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float | None
    truncated: bool
    tokens: int


class CompletionPage(TypedDict):
    """Some of the completions of a rollout. ``num_matching``: those with the searched text;
    ``unreadable``: lines that are not completions; ``is_cut``: the file is too large to be read to
    its end."""

    completions: list[ShownCompletion]
    num_completions: int
    num_matching: int
    unreadable: int
    is_cut: bool


def rollout_steps(folder: Path) -> list[int]:
    """Return the steps of the files in a folder, the latest first; none if there is no such folder,
    or if it is a symbolic link."""
    if os.path.realpath(folder) != str(folder):
        return []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = [match for match in map(_FILE.match, names) if match is not None]
    return sorted((int(match[1]) for match in matches), reverse=True)[:_MAX_FILES]


def read_completions(
    folder: Path, step: int, search: str, order: Order, offset: int, limit: int
) -> CompletionPage | None:
    """Return some completions of a rollout; None if it has no file.

    Args:
        search: text that the prompt or the completion must contain, in any case.
        order: ``file``, or by reward; completions without a reward are last.
    """
    handle = open_inside(folder / f"step-{step:08d}.jsonl")
    if handle is None:
        return None
    with handle:
        raw = handle.read(_MAX_BYTES + 1)
    is_cut = len(raw) > _MAX_BYTES
    lines = [line for line in raw[:_MAX_BYTES].split(b"\n") if line]
    if is_cut:
        lines.pop()
    read = [_completion(line) for line in lines]
    completions = [each for each in read if each is not None]
    matching = [each for each in completions if _contains(each, search.casefold())]
    if order != "file":
        sign = -1 if order == "best" else 1
        matching.sort(key=lambda each: _place(each["reward"], sign))
    return CompletionPage(
        completions=[_cut(each) for each in matching[offset : offset + limit]],
        num_completions=len(completions),
        num_matching=len(matching),
        unreadable=len(read) - len(completions),
        is_cut=is_cut,
    )


def _completion(line: bytes) -> ShownCompletion | None:
    try:
        value = from_json(line, cache_strings="keys")
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("completion"), str):
        return None
    record: JSONObject = value
    ids = record.get("completion_ids")
    return ShownCompletion(
        prompt=finite(record.get("prompt")),
        index=finite(record.get("index")),
        prompt_text=as_text(record.get("prompt_text"), len(line)) or "",
        completion=as_text(record.get("completion"), len(line)) or "",
        reward=finite(record.get("reward")),
        rewards={
            str(name)[:200]: finite(reward)
            for name, reward in list(as_object(record.get("rewards")).items())[:50]
        },
        advantage=finite(record.get("advantage")),
        truncated=record.get("truncated") is True,
        tokens=len(ids) if isinstance(ids, list) else 0,
    )


def _contains(completion: ShownCompletion, text: str) -> bool:
    texts = (completion["prompt_text"], completion["completion"])
    return not text or any(text in each.casefold() for each in texts)


def _place(reward: float | None, sign: int) -> tuple[bool, float]:
    return (True, 0.0) if reward is None else (False, sign * reward)


def _cut(completion: ShownCompletion) -> ShownCompletion:
    shortened = completion.copy()
    shortened["prompt_text"] = completion["prompt_text"][:_MAX_TEXT]
    shortened["completion"] = completion["completion"][:_MAX_TEXT]
    return shortened

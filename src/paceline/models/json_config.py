"""The content of a model's config.json and of files like it. No torch here."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

JsonObject = Mapping[str, JsonValue]


def read_object(file: Path) -> dict[str, JsonValue] | None:
    """The object in a JSON file; None if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def language_fields(content: JsonObject) -> JsonObject:
    """The fields of a config.json, those of the language model within it first."""
    nested = content.get("text_config")
    return {**content, **nested} if isinstance(nested, Mapping) else content


def first_number(content: JsonObject, *names: str) -> int | None:
    """The first of these fields that is a positive whole number."""
    for name in names:
        value = content.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None

"""Read a model's config.json and similar files. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

JsonObject = Mapping[str, JsonValue]


def read_object(file: Path) -> dict[str, JsonValue] | None:
    """Return the object in a JSON file, or None if the file cannot be read or does not contain an
    object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def language_fields(content: JsonObject) -> JsonObject:
    """Return the fields of a config.json, overridden by the fields of its nested language model, if
    there is one."""
    nested = content.get("text_config")
    return {**content, **nested} if isinstance(nested, Mapping) else content


def first_number(content: JsonObject, *names: str) -> int | None:
    """Return the first of these fields that is a positive integer, or None."""
    for name in names:
        value = content.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None

"""Read the catalogue of codes, which :mod:`paceline.messages.reference` generates, and the texts of
codes in other languages."""

import json
from functools import cache
from pathlib import Path
from typing import TypedDict

import yaml

CODES = Path(__file__).with_name("codes.json")
CHINESE = Path(__file__).with_name("zh.yaml")


class CodeText(TypedDict):
    """A text of a code in English. ``{name}`` stands for a value, ``…`` for other text.

    Args:
        allowed: description of what is accepted; empty if there is none.
        fix: advice on what to do; empty if there is none.
    """

    what: str
    allowed: str
    fix: str


class CodeEntry(TypedDict):
    """What a code means.

    Args:
        kind: "usage" (exit code 2), "run" (exit code 1), "stopped" or "notice".
        areas: packages that use the code, such as "data".
        fields: names of the values that accompany every use of the code.
        texts: wordings, one for each place in the code that uses it.
    """

    kind: str
    areas: list[str]
    fields: list[str]
    texts: list[CodeText]


@cache
def codes() -> dict[str, CodeEntry]:
    """Return every code."""
    entries: dict[str, CodeEntry] = json.loads(CODES.read_text(encoding="utf-8"))
    return entries


@cache
def chinese() -> dict[str, dict[str, str | list[str]]]:
    """Return the Chinese templates by code: ``what``, and ``allowed`` and ``fix`` where they
    are written. A list has several templates: the first one whose values are all present is used.
    ``{name}`` is replaced by a value."""
    texts: dict[str, str | list[str] | dict[str, str | list[str]]]
    texts = yaml.safe_load(CHINESE.read_text(encoding="utf-8"))
    return {
        code: text if isinstance(text, dict) else {"what": text} for code, text in texts.items()
    }


#: Why an error of an area occurs, for codes whose text does not say it.
_AREAS = {
    "bench": "found before a measurement",
    "checkpoint": "found while a checkpoint was read or written",
    "cluster": "found while several hosts were connected or a job was prepared",
    "commands": "found in the arguments of a command",
    "config": "found while the config was read",
    "core": "found while a folder of a run or code of the user was opened",
    "data": "found while the data was read",
    "distributed": "found while devices and ranks were set up",
    "doctor": "found while the machine was checked",
    "health": "found while the ranks were watched during training",
    "inference": "found while a trained model was loaded or used",
    "launch": "found before the ranks were started, or while they were watched",
    "models": "found while the model was loaded",
    "parallel": "found while the parallel mode was checked",
    "planner": "found while memory and time were estimated",
    "simulation": "found while devices were simulated",
    "strategies": "found while the parallel mode was set up",
    "sweep": "found while a sweep was prepared or run",
    "tasks": "found while the task and its data were checked",
    "train": "found during training",
    "verify": "found while parallel modes were compared",
    "web": "found by the panel",
}
_KINDS = {
    "usage": "The config, the input or the usage is not valid. Nothing was started (exit code 2).",
    "run": "A run or a command had started and failed (exit code 1).",
    "stopped": "A signal stopped the command (exit code 130 or 143).",
    "notice": "The run continues.",
}


def cause_of(entry: CodeEntry) -> str:
    """Return what kind of failure a code stands for, and where it is found."""
    places = [_AREAS[area] for area in entry["areas"] if area in _AREAS]
    where = f" It is {', or '.join(places)}." if places else ""
    return f"{_KINDS[entry['kind']]}{where}"

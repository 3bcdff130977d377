"""The page of an explanation: one HTML file that opens offline and plays what was recorded."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render(
    title: str, about: str, facts: list[tuple[str, str]], player: dict[str, Any], text: str
) -> str:
    """The whole page.

    Args:
        facts: pairs of label and value that stand above the picture.
        player: what page.js draws: ``kind`` (chunks, timeline or memory) and the recorded data of
            that kind; ``captions`` has one line a frame.
        text: the same for readers without a script.
    """
    return str(
        _template().render(
            title=title,
            about=about,
            facts=[{"label": label, "value": value} for label, value in facts],
            data=_script_json(player),
            style=_markup((_HERE / "page.css").read_text(encoding="utf-8")),
            script=_markup((_HERE / "page.js").read_text(encoding="utf-8")),
            text=text,
            frames=len(player["captions"]),
        )
    )


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((_HERE / "page.html.jinja").read_text(encoding="utf-8"))


def _script_json(value: Any) -> Any:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return _markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)

"""Chinese descriptions of the config, which the panel and docs/zh/config.md show. The English
ones are in the schema."""

from functools import cache
from pathlib import Path

import yaml


@cache
def chinese() -> dict[str, str]:
    """Return the description of each section (``lora``), key (``lora.rank``) and key of a data
    source (``dataset.path``)."""
    text = Path(__file__).with_name("descriptions_zh.yaml").read_text(encoding="utf-8")
    descriptions: dict[str, str] = yaml.safe_load(text)
    return descriptions

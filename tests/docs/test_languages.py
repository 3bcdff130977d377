"""The Chinese pages show the same commands, configs and config keys as the English pages."""

import re
from pathlib import Path

import pytest

from paceline.config.fields import KEYS, SECTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCED_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
COMMENT = re.compile(r"(^|\s)#.*")
#: Short name → key of `train_args`: a config may set these keys at the top level.
SHORT_NAMES = {
    key.removeprefix("train_args."): key for key in KEYS if key.startswith("train_args.")
}


def english_page(name: str) -> Path:
    """Return the English page of docs/zh/``name``."""
    guide = DOCS / "how-to" / name
    return guide if guide.is_file() else DOCS / name


PAIRS = [(ROOT / "README.md", ROOT / "README.zh-CN.md")] + [
    (english_page(str(chinese.relative_to(DOCS / "zh"))), chinese)
    for folder in (DOCS / "zh", DOCS / "zh/config")
    for chinese in sorted(folder.glob("*.md"))
    if chinese.name != "index.md"
]


@pytest.fixture(params=PAIRS, ids=[str(chinese.relative_to(ROOT)) for _, chinese in PAIRS])
def pages(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the English and the Chinese text of a page."""
    english, chinese = request.param
    return english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[list[str]]:
    """Return the lines of each block in a language, without comments and empty lines."""
    blocks = []
    for _, block_language, code in FENCED_BLOCK.findall(text):
        if block_language == language:
            lines = [COMMENT.sub("", line).rstrip() for line in code.splitlines()]
            blocks.append([line for line in lines if line])
    return blocks


def config_keys(text: str) -> set[str]:
    """Return the config keys in inline code, such as `lora.rank: 8` or `learning_rate`."""
    keys = set()
    for _, code in INLINE_CODE.findall(FENCED_BLOCK.sub("", text)):
        name = re.split(r"[:= ]", code.strip(), maxsplit=1)[0].removeprefix("--")
        key = SHORT_NAMES.get(name, name)
        if key in KEYS or key in SECTIONS:
            keys.add(key)
    return keys


@pytest.mark.parametrize("language", ["bash", "yaml"])
def test_code_blocks_are_equal(pages: tuple[str, str], language: str) -> None:
    english, chinese = pages
    assert code_blocks(chinese, language) == code_blocks(english, language)


def test_config_keys_are_equal(pages: tuple[str, str]) -> None:
    english, chinese = pages
    assert config_keys(chinese) == config_keys(english)


def test_predictions_for_the_recipes_are_equal() -> None:
    english = (DOCS / "how-to/recipes.md").read_text(encoding="utf-8")
    chinese = (DOCS / "zh/recipes.md").read_text(encoding="utf-8")
    rows = english.split("<!-- predicted: begin -->")[1].split("<!-- predicted: end -->")[0]
    translated = {" of ": " / ", " %": "%", "depends on the CPU": "取决于 CPU"}
    for english_row in rows.strip().splitlines()[2:]:
        row = english_row
        for text, chinese_text in translated.items():
            row = row.replace(text, chinese_text)
        assert row in chinese

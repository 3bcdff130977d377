"""Test that the generated reference pages match the schema."""

import json
import re
import subprocess
import sys

from paceline.config import reference
from paceline.config.fields import KEYS, SECTIONS, chinese
from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource


def test_pages_are_up_to_date() -> None:
    assert reference.main(["--check"]) is None


ANCHOR = re.compile(r'^\| <a id="([\w.]+)"></a>`(\w+)` \| (`.+?`|required|必填) \| ', re.MULTILINE)
SOURCE_KEYS = [f"dataset.{name}" for name in DatasetSource.model_fields]


def test_pages_have_an_anchor_for_every_key() -> None:
    pages = reference.english_pages()
    rows = [row for page in pages.values() for row in ANCHOR.findall(page)]
    assert sorted(anchor for anchor, _, _ in rows) == sorted([*KEYS, *SOURCE_KEYS])
    assert all(anchor.split(".")[-1] == key for anchor, key, _ in rows)
    assert ANCHOR.findall(pages["config/lora.md"])[0][0] == "lora.enable"
    assert "yaml-language-server" in pages["config.md"]
    assert all(f"config/{name}.md" in pages["config.md"] for name in SECTIONS)
    assert "finetuning_type" in pages["config/other-tools.md"]


def test_every_key_is_described_in_chinese() -> None:
    assert set(chinese()) == {*KEYS, *SECTIONS, *SOURCE_KEYS}
    sentences = [bool(re.search("[一-鿿].*。$", text)) for text in chinese().values()]
    assert all(sentences)


def test_both_languages_list_the_same_keys_and_defaults() -> None:
    chinese_pages = reference.chinese_pages()
    for name, page in reference.english_pages().items():
        if name != "config/other-tools.md":
            translated = chinese_pages[f"zh/{name}"].replace("必填", "required")
            assert ANCHOR.findall(translated) == ANCHOR.findall(page)


def test_schema_is_a_json_schema() -> None:
    schema = json.loads(reference.schema_json())
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["required"] == ["model", "dataset"]


def test_loading_a_config_imports_no_heavy_module() -> None:
    heavy = "('torch', 'transformers', 'datasets', 'rich')"
    code = f"import sys, paceline.config.load; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

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


def test_page_lists_every_key() -> None:
    page = reference.markdown()
    assert all(f"| `{key}` |" in page for key in KEYS)
    assert "finetuning_type" in page
    assert "yaml-language-server" in page


def test_every_key_is_described_in_chinese() -> None:
    source_keys = {f"dataset.{name}" for name in DatasetSource.model_fields}
    assert set(chinese()) == {*KEYS, *SECTIONS, *source_keys}
    sentences = [bool(re.search("[一-鿿].*。$", text)) for text in chinese().values()]
    assert all(sentences)


def test_both_languages_list_the_same_keys_and_defaults() -> None:
    english, _, _ = reference.markdown().partition("## Keys of other tools")
    row = re.compile(r"^\| `([\w.]+)` \| .* \| (`.+?`|required|必填) \| ", re.MULTILINE)
    chinese_rows = row.findall(reference.chinese_markdown().replace("必填", "required"))
    assert chinese_rows == row.findall(english)
    assert len(chinese_rows) == len(KEYS) + len(DatasetSource.model_fields)


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

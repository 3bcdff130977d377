"""Test that YAML is read safely and with line numbers, and that errors name the problem."""

import math
from pathlib import Path

import pytest
import yaml
from raised import raises_error

from paceline.config.yaml_read import Dumper, parse_value, parse_yaml, read_config_file
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.0e-4", 1e-4), ("-2E+3", -2000.0), (".5", 0.5), ("5.", 5.0),
        ("1_000", 1000), ("0x10", 16),
        ("010", 10), ("true", True), ("No", False), ("null", None), ("~", None), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"), ("<|end|>", "<|end|>"), ("!!str 5", "5"), ("!!float 5", 5.0), ("e5", "e5"),
        ("1e", "1e"), ("-", "-"),
    ],
)  # fmt: skip
def test_reads_plain_values(text: str, value: object) -> None:
    if text != "-":
        actual = parse_yaml(f"key: {text}\n", "c.yaml").value["key"]
        assert actual == value
        assert type(actual) is type(value)


def test_infinity_is_a_number() -> None:
    assert parse_yaml("a: -.inf", "c").value["a"] == -math.inf


def test_records_the_line_of_every_key() -> None:
    document = parse_yaml("# c\na: 1\n\nb:\n  c: [1,\n     2]\n  d: {e: 3}\n", "c.yaml")
    assert document.lines[("a",)] == 2
    assert document.lines[("b", "c")] == 5
    assert document.lines[("b", "c", 1)] == 6
    assert document.lines[("b", "d", "e")] == 7


def test_resolves_anchors_and_merge_keys() -> None:
    document = parse_yaml("base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  y: 3\n", "c.yaml")
    assert document.value["other"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (
            "a: !!python/object/apply:os.system [ls]\n",
            ["line 1", "!!python/object/apply:os.system", "run code", "remove the tag"],
        ),
        ("a: 1\nb: !!python/name:os.system\n", ["line 2", "tag"]),
        ("a: !mine x\n", ["line 1", "`!mine`"]),
        ("!!set {a, b}\n", ["line 1", "!!set"]),
        ("a: 1\nb: 2\na: 3\n", ["line 3", "`a` stands twice", "line 1"]),
        ("x:\n  r: 1\n  r: 2\n", ["line 3", "`r` stands twice", "line 2"]),
        ("a: 1\nb:\n\t- c\n", ["line 3", "column 1", "tab", "spaces"]),
        ("a: b: c\n", ["line 1", "column 5", "not valid YAML"]),
        ("a: [1, 2\n", ["line 1", "not valid YAML"]),
        ("a: 'x\n", ["line 1", "not valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["line 2", "second document"]),
        ("a: &x [*x]\n", ["anchor refers to itself"]),
        ("? [a, b]\n: 1\n", ["line 1", "key that is a list"]),
        ("a: \x00\n", ["c.yaml is not valid YAML"]),
        ("a: !!int x\n", ["line 1", "does not fit its tag"]),
        ("<<: 3\n", ["line 1", "takes a mapping"]),
        ("[" * 5000, ["not valid YAML"]),
    ],
)
def test_rejects_unsafe_or_invalid_yaml(text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "c.yaml")
    for fragment in ["c.yaml", *fragments]:
        assert fragment in str(caught.value)


def test_rejects_anchor_bomb() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with raises_error(ConfigError, code="too-many-values"):
        parse_yaml("\n".join(lines), "c.yaml")


def test_reports_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: 1")
    cases = {
        "ruin.yaml": ["there is no config file", "did you mean", "run.yaml"],
        "sub/none.yaml": ["does not exist"],
        ".": ["is a folder", "run.yaml"],
    }
    for name, fragments in cases.items():
        with pytest.raises(ConfigError) as caught:
            read_config_file(tmp_path / name)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
    contents = {
        b"": ["is empty"], b"# nothing\n": ["is empty"], b"- a\n": ["holds a list"],
        b"hello": ["holds text"],
        b"a: 1\nb: \xff\n": ["not UTF-8", "0xff", "line 2"], "a: 1".encode("utf-16"): ["not UTF-8"],
    }  # fmt: skip
    for raw, fragments in contents.items():
        (tmp_path / "broken.yaml").write_bytes(raw)
        with pytest.raises(ConfigError) as caught:
            read_config_file(tmp_path / "broken.yaml")
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_accepts_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert read_config_file(tmp_path / "c.yaml").value == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[a, 1e-3]", ["a", 1e-3]), ("{x: 1}", {"x": 1}), ("null", None), ("", None),
        ("a: b", "a: b"), ("-1", -1),
        ("'7'", "7"), ("'a' b", "'a' b"), ("C:\\data", "C:\\data"), ("a#5", "a#5"), ("true", True),
        ("1e-4", 1e-4),
    ],
)  # fmt: skip
def test_parses_command_line_values(text: str, value: object) -> None:
    assert parse_value(text, "key=") == value


@pytest.mark.parametrize(
    "text",
    [
        "1e-4",
        "1.5",
        "1:30",
        "010",
        "null",
        "yes",
        "2024-01-01",
        "a: b",
        " x",
        "x\ny",
        "~",
        "# c",
        "1_0",
    ],
)
def test_dumped_text_reloads_as_text(text: str) -> None:
    assert parse_yaml(yaml.dump({"a": text}, Dumper=Dumper), "c").value["a"] == text

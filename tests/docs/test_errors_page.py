"""Test the catalogue of codes, its pages, and the Chinese texts."""

import ast
import re

import pytest

from paceline.cli import main
from paceline.core.errors import PacelineError
from paceline.messages import reference
from paceline.messages.catalogue import chinese, codes
from paceline.messages.collect import SOURCE, sites, trees

FIELD = re.compile(r"\{(\w+)\}")


def subclasses(kind: type) -> set[str]:
    """Return the names of a class and of its subclasses, as far as they are imported."""
    names = {kind.__name__}
    for child in kind.__subclasses__():
        names |= subclasses(child)
    return names


def test_catalogue_and_pages_are_up_to_date() -> None:
    assert reference.main(["--check"]) is None


def test_every_error_has_a_code() -> None:
    kinds = subclasses(PacelineError) - {"ReportedError"}
    without = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            is_error = isinstance(node, ast.Call) and getattr(node.func, "id", "") in kinds
            if is_error and not any(word.arg == "code" for word in node.keywords):
                without.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert without == []


def test_every_field_has_a_value() -> None:
    """A value that the English text does not show is for the Chinese one."""
    used = {
        code: {name for text in texts.values() for name in FIELD.findall(str(text))}
        for code, texts in chinese().items()
    }
    for site in sites():
        given, in_chinese = set(site.fields), set().union(*(used.get(c, ()) for c in site.by_code))
        assert site.used() <= given, site.place
        assert given - site.used() <= in_chinese, site.place


def test_chinese_texts_fit_their_codes() -> None:
    for code, parts in chinese().items():
        assert code in codes(), f"{code} no longer exists"
        assert set(parts) <= {"what", "allowed", "fix"}, code
        for texts in parts.values():
            for text in [texts] if isinstance(texts, str) else texts:
                assert set(FIELD.findall(text)) <= set(codes()[code]["fields"]), code
                assert not re.search(r"[一-鿿][,;:?!(]|[)][一-鿿]", text), f"{code}: half-width"


def test_every_code_has_a_chinese_text() -> None:
    """Except texts that are made elsewhere, such as the message of another library."""
    made_elsewhere = {
        code
        for code, entry in codes().items()
        if all(text["what"] == "…" for text in entry["texts"])
    }
    assert set(codes()) - set(chinese()) <= made_elsewhere


def test_codes_are_kebab_case() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in codes())


def test_help_explains_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "[missing-weights]"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("has no weights", "git lfs pull", "exit code 2"))
    assert main(["help", "sft"]) == 0
    assert "--dry-run" in capsys.readouterr().out

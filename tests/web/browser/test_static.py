"""The files of the panel: their size, no parsing of markup, no external sources, two languages."""

import gzip
import re
from collections import Counter
from pathlib import Path

import paceline.web
from paceline.config.fields import SECTIONS

STATIC = Path(paceline.web.__file__).parent / "static"
FILES = [path for path in sorted(STATIC.rglob("*")) if path.is_file()]
SCRIPTS = [path for path in FILES if path.suffix == ".js" and "vendor" not in path.parts]


def test_compressed_size_is_below_300_kb() -> None:
    assert sum(len(gzip.compress(path.read_bytes(), 6)) for path in FILES) < 300_000


def test_page_has_no_inline_scripts_or_external_sources() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    for path in [*SCRIPTS, *STATIC.rglob("*.html"), *STATIC.rglob("*.css")]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(src|href|from|import|url)\W{1,3}https?://", text), path


def test_scripts_do_not_parse_markup() -> None:
    markup = (
        r"\.(innerHTML|outerHTML)\s*\+?=|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    for path in SCRIPTS:
        assert not re.search(markup, path.read_text(encoding="utf-8")), path


def test_every_imported_module_exists() -> None:
    for path in SCRIPTS:
        for name in re.findall(
            r"""(?:from|import)\s*\(?\s*["'](\.[^"']+)["']""", path.read_text(encoding="utf-8")
        ):
            assert (path.parent / name).is_file(), f"{path}: {name}"


def test_texts_exist_once_in_each_language() -> None:
    """All files share one table of texts. The meaning of a key in two files would depend on the
    order in which pages are opened."""
    english, chinese = ([], [])
    for path in (STATIC / "i18n").glob("*.js"):
        text = path.read_text(encoding="utf-8")
        before, _, after = text.partition("const zh = ")
        english += [] if path.stem.endswith("zh") else _keys(before)
        chinese += _keys(text if path.stem.endswith("zh") else after)
    assert len(english) > 300
    assert [key for key, count in Counter(english).items() if count > 1] == []
    # the names of config sections are the same in every language
    of_sections = {f"group.{name}" for name in SECTIONS if name != "lora"}
    assert sorted(set(english) - of_sections) == sorted(chinese)


def test_used_texts_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SCRIPTS]
    known = {
        key
        for path in (STATIC / "i18n").glob("*.js")
        for key in _keys(path.read_text(encoding="utf-8"))
    }
    used = {key for text in texts for key in re.findall(r"""\bt(?:ermOf)?\("([\w.]+)["]""", text)}
    assert len(used) > 100
    assert used - known == set()


def _keys(text: str) -> list[str]:
    return re.findall(r"""["']([\w.-]+)["']:\s""", text)

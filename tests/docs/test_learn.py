"""The course in docs/learn: each chapter has all its parts, in both languages, and its programs
print what the page shows."""

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from paceline.commands import explain
from paceline.commands.options import OptionParser

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "docs" / "learn", ROOT / "docs" / "zh" / "learn"
CHAPTERS = sorted(page.name for page in ENGLISH.glob("[0-9]*.md"))
MAX_LINES = 50
SECTIONS = {
    ENGLISH: ["See it", "Run it", "Numbers", "Exercise", "Where this lives in Paceline"],
    CHINESE: ["看图", "动手运行", "数据", "练习", "在 Paceline 中的位置"],
}
QUESTION = {ENGLISH: "**Question.**", CHINESE: "**问题：**"}
#: Chapters whose output has times, or losses that depend on rounding.
MEASURED = ("01", "04", "06", "08", "11", "12", "13", "15")
#: Each chapter names the machine of its numbers.
MACHINE = {ENGLISH: "virtual machine", CHINESE: "虚拟机"}
_DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r"^````{literalinclude} (\S+)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[[^\]]+\]\((\S+\.svg)\)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    matches = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in matches if kind == language]


def programs(page: Path) -> list[Path]:
    links = _INCLUDE.findall(page.read_text(encoding="utf-8"))
    return [(page.parent / link).resolve() for link in links]


def commands(page: Path) -> list[str]:
    """Return the lines of the shell blocks, with continued lines joined."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def code_lines(file: Path) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    source = file.read_text(encoding="utf-8")
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*no_code, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


@pytest.mark.parametrize("name", CHAPTERS)
@pytest.mark.parametrize("folder", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_chapter_has_all_parts(folder: Path, name: str) -> None:
    page = folder / name
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS[folder]
    assert text.count(QUESTION[folder]) == 1
    pictures = _PICTURE.findall(text)
    drawn = [line for line in commands(page) if line.startswith("paceline explain")]
    assert pictures
    assert len(drawn) == len(pictures)
    for picture, command in zip(pictures, drawn, strict=True):
        assert (folder / picture).is_file()
        assert command.endswith(f"--svg {Path(picture).name}")
    assert programs(page)
    for program in programs(page):
        assert code_lines(program) <= MAX_LINES, program.name
        assert program.name in text.split("## ")[2]
    assert len(blocks(page, "text")) == len(programs(page))
    assert MACHINE[folder] in text.split("## ")[3]


@pytest.mark.parametrize("name", CHAPTERS)
def test_languages_are_in_step(name: str) -> None:
    english, chinese = ENGLISH / name, CHINESE / name
    assert programs(chinese) == programs(english)
    for language in ("bash", "text"):
        assert blocks(chinese, language) == blocks(english, language)
    links = [
        [path.rpartition("/")[2] for path in re.findall(r"\]\((\S+\.(?:py|svg))\)", text)]
        for text in (english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8"))
    ]
    assert links[0] == links[1]


@pytest.mark.parametrize("name", CHAPTERS)
def test_explain_commands_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands(ENGLISH / name):
        if line.startswith("paceline explain"):
            parser = OptionParser("paceline explain")
            explain.add_arguments(parser)
            explain.make_options(parser.parse_args(shlex.split(line)[2:]))


def test_index_lists_every_chapter_and_every_program_has_a_page() -> None:
    for folder in (ENGLISH, CHINESE):
        text = (folder / "index.md").read_text(encoding="utf-8")
        assert sorted(re.findall(r"\]\((\d\S+\.md)\)", text)) == CHAPTERS
    shown = {program for name in CHAPTERS for program in programs(ENGLISH / name)}
    assert shown == set((ROOT / "examples" / "learn").glob("*.py"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", CHAPTERS)
def test_programs_print_what_the_page_shows(name: str) -> None:
    page = ENGLISH / name
    for program, expected in zip(programs(page), blocks(page, "text"), strict=True):
        lines = [line for line in commands(page) if program.name in line]
        # Chapters that run a program in two ways show the output once, if it is the same.
        outputs = [_run(line) for line in lines]
        if name.startswith(MEASURED):
            expected, outputs = _mask(expected), [_mask(output) for output in outputs]
        # The digest of weights depends on the processor, but all runs have the same.
        assert len(set(_DIGEST.findall("".join(outputs)))) <= 1
        expected = _DIGEST.sub("#", expected)
        outputs = [_DIGEST.sub("#", output) for output in outputs]
        assert "".join(outputs) == expected or all(output == expected for output in outputs)


def _run(line: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout


def _mask(text: str) -> str:
    """Replace numbers, with the spaces that align them."""
    return re.sub(r" *\d+(\.\d+)?", " #", text)

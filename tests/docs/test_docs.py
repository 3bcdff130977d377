"""Test that the links of the documentation exist, its commands parse and its configs load."""

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli import ALIASES, VERBS
from paceline.config.load import load_config
from paceline.config.overrides import split_cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = {"--dry-run", "--full", "--debug", "--allow-config-change", "--json"}


def blocks(page: Path, *kinds: str) -> list[str]:
    matches = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in matches if not kinds or kind in kinds]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `paceline` command in the shell blocks of a page."""
    lines = [line for text in blocks(page, "bash", "sh") for line in text.splitlines()]
    args = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("paceline") + 1 :] for line in args if "paceline" in line]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for args in commands(page):
        assert args, f"a bare `paceline` in {page.name}"
        assert args[0] in {*VERBS, *ALIASES}, f"paceline {' '.join(args)}"
        if args[0] in ("sft", "train"):
            # files of the reader
            users_files = [
                arg for arg in args[1:] if arg.endswith(".yaml") and not (ROOT / arg).exists()
            ]
            arguments = [arg for arg in args[1:] if arg not in FLAGS and arg not in users_files]
            for key in ("model", "dataset"):
                if users_files and not any(arg.startswith(f"{key}=") for arg in arguments):
                    arguments.append(f"{key}=placeholder")
            load_config(*split_cli(arguments))


def test_readme_shows_the_main_commands() -> None:
    assert {args[0] for args in commands(ROOT / "README.md")} >= {
        "sft",
        "watch",
        "generate",
        "inspect",
    }


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_configs_load(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "yaml", "yml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        warnings = [text for level, text in load_config(file).notices if level == "warning"]
        assert warnings == []


def test_architecture_page_lists_every_verb() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = text[text.index("**Verbs.**") :].split("A config is", 1)[0]
    assert set(re.findall(r"`(\w+)`", listing)) == {*VERBS, *ALIASES}


def test_python_blocks_compile() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, str(page), "exec")


def test_both_readmes_show_the_same_blocks() -> None:
    assert blocks(ROOT / "README.md") == blocks(ROOT / "README.zh-CN.md")


def test_make_targets_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    lines = [
        line.split()
        for page in PAGES
        for text in blocks(page, "bash")
        for line in text.splitlines()
    ]
    named = {
        line[1] for line in lines if line[:1] == ["make"] and len(line) > 1 and "=" not in line[1]
    }
    assert named <= targets


def test_every_how_to_page_is_linked_from_the_readme() -> None:
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        translated = (ROOT / "docs" / "zh" / page.name).is_file()
        assert f"(docs/how-to/{page.name})" in english
        assert f"(docs/{'zh' if translated else 'how-to'}/{page.name})" in chinese


def test_images_are_small() -> None:
    large = [
        path.name for path in (ROOT / "docs" / "images").iterdir() if path.stat().st_size > 300_000
    ]
    assert large == []

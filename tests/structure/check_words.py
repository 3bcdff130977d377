"""Check that no file uses the words listed in words.yaml.

`python tests/structure/check_words.py` prints each use with its location, and exits with 1 if there
is any. In JavaScript files, it checks all names except properties and keys of objects.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")
LISTS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
#: Comments, strings, template strings and regular expressions of JavaScript.
_JS_SKIPPED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"""
    r"""|(?<=[(,=:?&|!])\s*/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\[\n])+/""",
    re.DOTALL,
)
#: A name that is not a property (`.name`) and not the key of an object (`name:`).
_JS_NAME = re.compile(r"(?:(?<![\w$.])|(?<=\.\.\.))[A-Za-z_$][\w$]*\b(?!\s*:)")
_PHRASES = re.compile(
    rf"\b({'|'.join(map(re.escape, LISTS['phrases']))}|(?<!there )is no (?!longer|more))\b",
    re.IGNORECASE,
)


def main() -> int:
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in _uses(path, has_messages=folder == "src")
    ]
    uses += [
        f"{path.relative_to(ROOT)}:{line}: the name `{name}`"
        for path in sorted((ROOT / "src" / "paceline" / "web" / "static").rglob("*.js"))
        if "vendor" not in path.parts
        for line, name in _javascript_uses(path)
    ]
    print(*uses, sep="\n")
    print(f"{len(uses)} uses of words that tests/structure/words.yaml lists")
    return 1 if uses else 0


def _uses(path: Path, has_messages: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = _defined_name(node)
        if name is not None and _is_unwanted(name):
            yield node.lineno, f"the name `{name}`"
        elif has_messages and isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in _PHRASES.finditer(" ".join(node.value.split())):
                yield node.lineno, f'the words "{match[0]}"'


def _javascript_uses(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    code = _JS_SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(code.split("\n"), 1):
        for match in _JS_NAME.finditer(line):
            if _is_unwanted(match[0]):
                yield number, match[0]


def _defined_name(node: ast.AST) -> str | None:
    """Return the name that a node defines, except the names of tests."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return None if name.startswith("test_") else name
    return None


def _is_unwanted(name: str) -> bool:
    for allowed in LISTS["allowed"]:
        name = re.sub(allowed, "", name, flags=re.IGNORECASE)
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return name.lower().strip("_") in LISTS["names"] or bool(set(parts) & set(LISTS["identifiers"]))


if __name__ == "__main__":
    sys.exit(main())

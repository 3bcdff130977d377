"""Built-in datasets, made without a download: small questions, and what Python's standard library
contains.

Sources are parsed, never imported, because some modules have side effects on import. The rows
depend only on the Python version, so it is part of the name of the cached folder.
"""

import ast
import inspect
import json
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import ConfigError, unknown_name
from paceline.core.files import cache_dir
from paceline.data.cache import build_once
from paceline.data.questions import held_out_questions, small_questions
from paceline.data.sources.rows import Row

_LAYOUT = 2
_ANSWER_CHARS = 600
_DOCUMENT_CHARS = 6000
#: Packages that contain tests, generated tables or programs instead of library code.
_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
    "encodings",
    "site",
    "this",
    "antigravity",
    "turtle",
    "tkinter",
    "distutils",
    "idle_test",
    "__phello__",
    "sre_compile",
    "sre_constants",
    "sre_parse",
}
_QUESTIONS = {
    "function": [
        "What does {name} do?",
        "Explain the Python function {name}.",
        "What is {name}{args} for?",
        "How does {name}{args} behave?",
    ],
    "method": [
        "What does the method {name} do?",
        "Explain {name} in Python.",
        "What happens when {name}{args} is called?",
        "What is the method {name} for?",
    ],
    "class": [
        "What is the class {name}?",
        "Explain the Python class {name}.",
        "What is {name} used for?",
    ],
    "module": ["What is the Python module {name} for?", "What does the module {name} offer?"],
}

#: An answer begins with the kind of object and its owner, followed by its docstring.
_OPENINGS = {
    "function": "A function of the module `{owner}`: `{name}{args}`. ",
    "method": "A method of the class `{owner}`: `{name}{args}`. ",
    "class": "A class of the module `{owner}`: `{name}`. ",
    "module": "A module of Python's standard library: `{name}`. ",
}


#: Names of the built-in datasets, without the prefix ``builtin:``.
LABELED_DATASETS = ("python-kinds",)
QUESTION_DATASETS = ("small-questions", "small-questions-held-out")
BUILTIN_DATASETS = (*QUESTION_DATASETS, "python-docs", "python-source", *LABELED_DATASETS)


def builtin_dataset(name: str) -> Path:
    """Return the JSONL file of ``builtin:NAME``, made on first use. Its rows are ``{"messages"}``,
    ``{"text"}`` or ``{"text", "label"}``.

    Raises:
        ConfigError: the name is unknown, or this Python has no sources of its standard library.
    """
    check_builtin_dataset(name)
    folder = cache_dir() / "builtin" / f"{name}-{python_version()}-v{_LAYOUT}"
    build_once(folder, "rows.jsonl", lambda staging: _write(name, staging / "rows.jsonl"))
    return folder / "rows.jsonl"


def check_builtin_dataset(name: str) -> None:
    """Check that there is a dataset ``builtin:NAME``.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in BUILTIN_DATASETS:
        known = [f"builtin:{dataset}" for dataset in BUILTIN_DATASETS]
        raise unknown_name("built-in dataset", f"builtin:{name}", known)


def python_version() -> str:
    """Return the interpreter and its version, e.g. ``cpython3.11.7``."""
    return f"{platform.python_implementation().lower()}{platform.python_version()}"


def _write(name: str, path: Path) -> None:
    make = {
        "small-questions": small_questions,
        "small-questions-held-out": held_out_questions,
        "python-docs": python_docs,
        "python-source": python_source,
        "python-kinds": python_kinds,
    }[name]
    with open(path, "w", encoding="utf-8") as handle:
        for row in make():
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")


def python_docs() -> Iterator[Row]:
    """Yield a chat of one question and its answer for each documented public function, method,
    class and module."""
    for kind, name, args, answer in _described():
        wordings = _QUESTIONS[kind]
        wording = wordings[zlib.crc32(name.encode()) % len(wordings)]
        opening = _OPENINGS[kind].format(name=name, args=args, owner=name.rpartition(".")[0])
        yield {
            "messages": [
                {"role": "user", "content": wording.format(name=name, args=args)},
                {"role": "assistant", "content": opening + answer},
            ]
        }


def python_source() -> Iterator[Row]:
    """Yield documents of plain text: the sources of the top-level modules, split between top-level
    statements."""
    for _, path in stdlib_modules(packages=False):
        text = path.read_text(encoding="utf-8", errors="replace")
        document = ""
        for block in re.split(r"\n(?=(?:class|def|async def|@)\b|@)", text):
            if document and len(document) + len(block) > _DOCUMENT_CHARS:
                yield {"text": document}
                document = ""
            document += ("\n" if document else "") + block
        if document.strip():
            yield {"text": document}


def python_kinds() -> Iterator[Row]:
    """Yield labeled texts: the description of each documented public function, method, class and
    module, and which of these it is."""
    for kind, _, _, text in _described():
        yield {"text": text, "label": kind}


def stdlib_modules(packages: bool = True) -> list[tuple[str, Path]]:
    """Return (dotted name, source file) of the public modules of the standard library, sorted by
    name.

    Raises:
        ConfigError: the sources are missing (an interpreter shipped as bytecode).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    modules: list[tuple[str, Path]] = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _SKIPPED:
            continue
        if (root / f"{name}.py").is_file():
            modules.append((name, root / f"{name}.py"))
        elif packages and (root / name / "__init__.py").is_file():
            modules.extend(_package(name, root / name))
    if not modules:
        raise ConfigError(
            "built-in datasets are made from the sources of the standard library, but there are"
            " none in {root}",
            code="no-library-sources",
            fix="use another dataset, or a Python that ships its sources",
            root=root,
        )
    return modules


def _package(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("*.py"), key=lambda entry: entry.name):
        if path.stem == "__init__":
            yield name, path
        elif not path.stem.startswith("_"):
            yield f"{name}.{path.stem}", path


def _described() -> Iterator[tuple[str, str, str, str]]:
    """Yield (kind, dotted name, arguments, answer) of each public object with a docstring. A
    docstring that several names share is used once, so that it is not memorized."""
    seen: set[str] = set()
    for module, path in stdlib_modules():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # e.g. a template that only ends in .py
            continue
        for described in _documented(module, tree):
            if described[-1] not in seen:
                seen.add(described[-1])
                yield described


def _documented(module: str, tree: ast.Module) -> Iterator[tuple[str, str, str, str]]:
    """Yield (kind, dotted name, arguments, answer) of each public object with a docstring, in
    source order."""
    if answer := _answer(tree):
        yield "module", module, "", answer
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            if answer := _answer(node):
                yield "function", f"{module}.{node.name}", _args(node), answer
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if answer := _answer(node):
                yield "class", f"{module}.{node.name}", "", answer
            for inner in node.body:
                if (
                    isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not inner.name.startswith("_")
                    and (answer := _answer(inner))
                ):
                    yield "method", f"{module}.{node.name}.{inner.name}", _args(inner), answer


def _args(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = [*node.args.posonlyargs, *node.args.args]
    names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
    return f"({', '.join(names)})" if len(names) <= 4 else f"({', '.join(names[:4])}, ...)"


def _answer(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the docstring's first paragraphs, up to about 600 characters, with lines of prose
    joined; None if fewer than 20 characters."""
    raw = ast.get_docstring(node, clean=False)
    if not raw:
        return None
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(raw))
    answer = ""
    for paragraph in paragraphs:
        if ">>>" in paragraph or (answer and len(answer) + len(paragraph) > _ANSWER_CHARS):
            break
        is_prose = not any(
            line.startswith((" ", "\t", "-", "*", "|", "+")) for line in paragraph.splitlines()
        )
        text = " ".join(paragraph.split()) if is_prose else paragraph.rstrip()
        answer += ("\n\n" if answer else "") + text
    if len(answer) > _ANSWER_CHARS:
        cut = answer.rfind(". ", 0, _ANSWER_CHARS)
        answer = answer[: cut + 1] if cut > 0 else answer[:_ANSWER_CHARS].rsplit(" ", 1)[0]
    return answer if len(answer) >= 20 else None

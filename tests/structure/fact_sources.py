"""Read the source tree for `facts.py`: parsed files, docstrings, functions, classes and imports."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class SourceFile:
    """A parsed Python file. ``name``: its path relative to `src/paceline`, or to another folder."""

    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """Name of the folder of the first level, or of a module of that level."""
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def _by_type(self) -> dict[type[ast.AST], list[ast.AST]]:
        nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in ast.walk(self.tree):
            nodes[type(node)].append(node)
        return nodes

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """Return all nodes of the tree that are of one of these types, or of a subclass."""
        for kind, nodes in self._by_type.items():
            if issubclass(kind, kinds):
                yield from cast("list[Node]", nodes)

    def functions(self) -> Iterator[Function]:
        return self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)

    def classes(self) -> Iterator[ast.ClassDef]:
        return self.nodes(ast.ClassDef)

    def calls(self) -> Iterator[ast.Call]:
        return self.nodes(ast.Call)

    def docstrings(self) -> Iterator[ast.Constant]:
        """Return the docstrings of the module and of all its classes and functions."""
        for node in self.nodes(*_DOCUMENTED):
            if ast.get_docstring(node, clean=False) is not None:
                statement = node.body[0]
                assert isinstance(statement, ast.Expr)
                assert isinstance(statement.value, ast.Constant)
                yield statement.value


@dataclass(frozen=True)
class Import:
    """An import of a module of the package, anywhere in a file.

    Args:
        importer, module: dotted names of both modules.
        name: the imported name; None with ``import module``.
    """

    importer: str
    module: str
    line: int
    name: str | None


@dataclass(frozen=True)
class Source:
    """The files of a checkout."""

    root: Path

    @cached_property
    def files(self) -> dict[str, SourceFile]:
        """The files of `src/paceline` by their path in it."""
        return read_files(self.root / "src" / "paceline")

    @cached_property
    def tests(self) -> dict[str, SourceFile]:
        return read_files(self.root / "tests")

    def within(self, *packages: str) -> list[SourceFile]:
        """Return the files of the packages of the first level."""
        return [file for file in self.files.values() if file.package in packages]

    @cached_property
    def modules(self) -> dict[str, str]:
        """Dotted name of each module → the path of its file."""
        return {module_name(path): path for path in self.files}

    @cached_property
    def imports(self) -> list[Import]:
        return [each for file in self.files.values() for each in self._imports_of(file)]

    def _imports_of(self, file: SourceFile) -> Iterator[Import]:
        importer = module_name(file.name)
        for node in file.nodes(ast.ImportFrom, ast.Import):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if module := self._find_module(f"{node.module}.{alias.name}"):
                        yield Import(importer, module, node.lineno, alias.name)
            else:
                for alias in node.names:
                    if module := self._find_module(alias.name):
                        yield Import(importer, module, node.lineno, None)

    def _find_module(self, name: str) -> str:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name


#: This checkout, whose files are read once.
CHECKOUT = Source(Path(__file__).parents[2])


def read_files(folder: Path) -> dict[str, SourceFile]:
    """Return the Python files below a folder by their relative path."""
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }
    return {name: SourceFile(name, text, ast.parse(text)) for name, text in texts.items()}


def module_name(path: str) -> str:
    """Return the dotted name of the module in a file of `src/paceline`."""
    parts = ("paceline", *Path(path).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def last_name(node: ast.AST) -> str:
    """Return the name after the last dot: ``strategy`` of ``self.strategy``, also of its call."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def literal_texts(node: ast.AST) -> Iterator[str]:
    """Return all string constants below a node."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def direct_literals(node: ast.expr) -> Iterator[str]:
    """Return the text of a string constant, or the texts in a tuple, list or set of constants."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Constant):
        yield from literal_texts(node)


def is_raises_of(call: ast.AST, error: str) -> bool:
    """Return whether a call is ``pytest.raises(error)`` or one with a tuple that has the error."""
    return (
        isinstance(call, ast.Call)
        and last_name(call.func) == "raises"
        and bool(call.args)
        and any(last_name(node) == error for node in ast.walk(call.args[0]))
    )

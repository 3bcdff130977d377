"""Collect the codes from the syntax tree of the package: every call with an argument ``code``."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paceline.core.texts import FIELD
from paceline.messages.catalogue import CodeEntry, CodeText

SOURCE = Path(__file__).parents[1]
_PARTS = ("what", "allowed", "fix")
#: Keywords of errors that are not values of their text.
_PARAMETERS = frozenset(
    {
        *("code", "allowed", "fix", "ranks", "needed_bytes", "exit_code"),
        *("http_status", "param", "retry_after_s"),
    }
)
_KINDS = {
    "ConfigError": "usage",
    "SchemaError": "usage",
    "StoppedError": "stopped",
    "PacelineError": "run",
    "UserText": "notice",
}
#: Texts that a name or a call stands for, in the catalogue.
_OTHER = "…"


#: Modules of ``config`` whose texts are notices. The texts of the others are problems of a config.
_WITH_NOTICES = ("settings.py", "load.py", "chosen.py", "notices.py")


_NAMES_CODE = re.compile(r"\bcode=|raise \w+\(")


class Site:
    """A call that creates an error or a notice with codes known from the source.

    Attributes:
        place: path and line.
        fields: names of the values that it gives.
        by_code: its texts by code; more than one if the code depends on a condition.
    """

    def __init__(self, call: ast.Call, path: Path, kind: str, names: dict[str, ast.expr]) -> None:
        is_problem = path.is_relative_to(SOURCE / "config") and path.name not in _WITH_NOTICES
        kind = "usage" if kind == "notice" and is_problem else kind
        self.place = f"{path.relative_to(SOURCE)}:{call.lineno}"
        self.area = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        self.kind = kind
        given = {word.arg: word.value for word in call.keywords if word.arg is not None}
        self.fields = sorted(set(given) - _PARAMETERS)
        parts = {"what": call.args[0] if call.args else ast.Constant("")} | {
            part: given[part] for part in ("allowed", "fix") if part in given
        }
        texts = {part: _Resolver(names).texts(node) for part, node in parts.items()}
        self.templates = [text for variants in texts.values() for text in variants]
        codes = [
            node.value
            for node in _branches(given["code"])
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        self.by_code = {code: _wordings(texts, codes.index(code), len(codes)) for code in codes}

    def used(self) -> set[str]:
        """Return the fields of its templates."""
        return {match[1] for text in self.templates for match in FIELD.finditer(text)}


def _branches(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [*_branches(node.body), *_branches(node.orelse)]
    return [node]


def _wordings(texts: dict[str, list[str]], number: int, count: int) -> list[CodeText]:
    """Return the wordings of one of several codes: texts with as many branches belong to them."""
    own = {
        part: [variants[number]] if count > 1 and len(variants) == count else variants
        for part, variants in texts.items()
    }
    size = max(len(variants) for variants in own.values())
    return [
        CodeText(
            what=_at(own.get("what"), index),
            allowed=_at(own.get("allowed"), index),
            fix=_at(own.get("fix"), index),
        )
        for index in range(size)
    ]


def _at(variants: list[str] | None, index: int) -> str:
    return variants[min(index, len(variants) - 1)] if variants else ""


class _Resolver:
    """Resolves expressions to templates.

    Args:
        names: constants of the module.
    """

    def __init__(self, names: dict[str, ast.expr]) -> None:
        self.names = names

    def texts(self, node: ast.expr) -> list[str]:
        """Return the templates that an expression may stand for."""
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body), *self.texts(node.orelse)]
        if isinstance(node, ast.BoolOp):
            found = [text for value in node.values for text in self.texts(value)]
            return list(dict.fromkeys(text for text in found if text != _OTHER)) or [_OTHER]
        return [self.text(node)]

    def text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return node.value.strip() if isinstance(node.value, str) else ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return f"{self.text(node.left)} {self.text(node.right)}".replace(" ,", ",")
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(value.value) if isinstance(value, ast.Constant) else _OTHER
                for value in node.values
            )
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.text(self.names[node.id])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "did_you_mean":
                rest = self.text(node.args[2]) if len(node.args) > 2 else ""
                return f"use the similar name that the message gives, or {rest}" if rest else _OTHER
            if node.func.id in ("similar_path", "windows_fix"):
                return "check the path"
        return _OTHER


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the modules that name a code or create an error."""
    texts = {path: path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return {path: ast.parse(text) for path, text in texts.items() if _NAMES_CODE.search(text)}


@cache
def sites() -> list[Site]:
    """Return every call with a code, in the order of paths and lines."""
    return list(_find_sites())


def _find_sites() -> Iterator[Site]:
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for path, tree in trees().items():
        names = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        local: dict[str, ast.expr] = {}  # the latest assignments before a call
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Assign)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign):
                if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
                    local[node.targets[0].id] = node.value
                continue
            kind = _kind_of(node.func.id, bases) if isinstance(node.func, ast.Name) else None
            if kind is not None and any(word.arg == "code" for word in node.keywords):
                yield Site(node, path, kind, names | local)


def _kind_of(name: str, bases: dict[str, list[str]]) -> str | None:
    """Return the kind of error or notice that a class is; None for other names."""
    if name in _KINDS:
        return _KINDS[name]
    kinds = (_kind_of(base, bases) for base in bases.get(name, []) if base != name)
    return next((kind for kind in kinds if kind is not None), None)


def collect() -> dict[str, CodeEntry]:
    """Return the catalogue: every code with its texts."""
    entries: dict[str, CodeEntry] = {}
    for site in sites():
        for code, wordings in site.by_code.items():
            entry = entries.setdefault(
                code, CodeEntry(kind=site.kind, areas=[], fields=site.fields, texts=[])
            )
            entry["fields"] = [name for name in entry["fields"] if name in site.fields]
            if site.area not in entry["areas"]:
                entry["areas"].append(site.area)
            entry["texts"] += [text for text in wordings if text not in entry["texts"]]
    return dict(sorted(entries.items()))

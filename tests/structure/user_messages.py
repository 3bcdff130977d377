"""Collect every message for users from the syntax tree.

`python tests/structure/user_messages.py > messages.txt` gives a reviewer a text to read from top to
bottom, and to compare with the messages of another version.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
_LEVELS = ("info", "warning", "error", "exception")
_PARTS = ("allowed", "fix")


def collect() -> str:
    """Return, for each module, the text of its errors and log records, with
    placeholders in braces."""
    sections = []
    for path in sorted(SOURCE.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if _is_message(node)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        entries = [entry for call in calls for entry in _entries(call)]
        if entries:
            sections.append("\n".join([f"== {path.relative_to(SOURCE)}", *entries]))
    return "\n\n".join(sections) + "\n"


def _is_message(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    if isinstance(node.func, ast.Attribute):
        return (
            isinstance(node.func.value, ast.Name)
            and node.func.value.id == "logger"
            and node.func.attr in _LEVELS
        )
    return isinstance(node.func, ast.Name) and node.func.id.endswith(("Error", "Stopped"))


def _entries(call: ast.Call) -> Iterator[str]:
    text = _text(call.args[0])
    if not _has_words(call.args[0]):
        return  # the message is built in another place
    name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
    yield f"{name}: {text}"
    for keyword in call.keywords:
        if keyword.arg in _PARTS:
            yield f"    {keyword.arg}: {_text(keyword.value)}"


def _has_words(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value.strip()
        for part in ast.walk(node)
    )


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with braces around all that is not a literal."""
    if isinstance(node, ast.Constant):
        return str(node.value).replace("\n", "\\n")
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{{{_text(node.body)} | {_text(node.orelse)}}}"
    return f"{{{ast.unparse(node)}}}"


if __name__ == "__main__":
    print(collect(), end="")

"""Test the structure of the source tree: import cycles, sizes of files and folders, untyped
mappings, output that bypasses logging, and the map in docs/architecture.md."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from fact_sources import CHECKOUT, last_name
from fact_structure import find_cycles

SOURCE = CHECKOUT.root / "src" / "paceline"
MAX_LINES = 500
MAX_MODULES = 16
#: One file per command or topic.
ANY_NUMBER_OF_MODULES = {"commands", "explain/topics"}
MAX_UNTYPED_MAPPINGS = 60
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
#: Folders and modules that print the results of commands.
PRINTING = ("commands/", "cli.py")
#: The console layer, which writes messages and progress.
CONSOLE = ("core/log.py", "data/progress.py", "observe/console.py", "observe/terminal.py")


def test_no_import_cycles() -> None:
    imports: dict[str, set[str]] = {name: set() for name in CHECKOUT.modules}
    for each in CHECKOUT.imports:
        if each.module != each.importer:
            imports[each.importer].add(each.module)
    assert find_cycles(imports) == []


def test_cycles_are_detected() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert find_cycles(imports) == [["b", "c"]]


def test_files_are_at_most_500_lines_long() -> None:
    lengths = {name: len(file.lines) for name, file in CHECKOUT.files.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_folders_hold_at_most_16_modules() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for path in SOURCE.rglob("*.py"):
        sizes[path.parent.relative_to(SOURCE).as_posix()] += 1
    too_large = {name: size for name, size in sizes.items() if size > MAX_MODULES}
    assert {name: too_large[name] for name in too_large.keys() - ANY_NUMBER_OF_MODULES} == {}


def parse_files() -> dict[str, ast.Module]:
    return {name: file.tree for name, file in CHECKOUT.files.items()}


def is_untyped_mapping(node: ast.AST) -> bool:
    """Return whether a type is a mapping with values of any type, such as ``dict[str, Any]``."""
    return (
        isinstance(node, ast.Subscript)
        and last_name(node.value) in MAPPINGS
        and isinstance(node.slice, ast.Tuple)
        and last_name(node.slice.elts[-1]) in ("Any", "object")
    )


def walk_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Return all nodes, also those of types in quotes."""
    for node in ast.walk(tree):
        yield node
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and ("Any]" in node.value or "object]" in node.value):
            try:
                quoted = ast.parse(node.value, mode="eval")
            except SyntaxError:
                continue
            for inner in ast.walk(quoted):
                yield ast.copy_location(inner, node)


def find_aliases(tree: ast.Module) -> Iterator[str]:
    """Return the names in a module that stand for untyped mappings, or for types with one."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
            statement.value, ast.Subscript | ast.BinOp | ast.Constant
        ):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if any(is_untyped_mapping(node) for node in walk_types(statement.value)):
                yield last_name(target)


def find_untyped_mappings(trees: dict[str, ast.Module]) -> list[str]:
    aliases = {name for tree in trees.values() for name in find_aliases(tree)}
    return [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, tree in trees.items()
        for node in walk_types(tree)
        if is_untyped_mapping(node)
        or (isinstance(node, ast.Name) and node.id in aliases and isinstance(node.ctx, ast.Load))
    ]


def test_few_mappings_are_untyped() -> None:
    mappings = find_untyped_mappings(parse_files())
    text = "give the values a type (TypedDict, dataclass, JsonValue):\n" + "\n".join(mappings)
    assert len(mappings) < MAX_UNTYPED_MAPPINGS, text


def test_untyped_mappings_and_their_aliases_are_counted() -> None:
    text = """
Rows = dict[str, Any]
def read(rows: Rows, more: "Mapping[str, list[dict[str, object]]]") -> dict[str, list[Any]]: ...
values = cast("dict[int, Any]", typing.Mapping[str, typing.Any])
"""
    assert len(find_untyped_mappings({"module.py": ast.parse(text)})) == 5


def find_output(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the calls of ``print``, and the writes to the standard streams."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("print", "builtins.print") or re.fullmatch(
                r"sys\.(__)?std(out|err)(__)?(\.buffer)?\.write(lines)?", called
            ):
                yield node.lineno, called


def test_only_commands_and_the_console_print() -> None:
    calls = [
        f"{name}:{line} {called}"
        for name, tree in parse_files().items()
        if not name.startswith(PRINTING) and name not in CONSOLE
        for line, called in find_output(tree)
    ]
    assert not calls, "use logging or `write_line`:\n" + "\n".join(calls)


def test_output_is_detected() -> None:
    text = "print(1)\nsys.stderr.write('')\nconsole.print('')\nsys.stdout.buffer.write(b'')"
    assert [line for line, _ in find_output(ast.parse(text))] == [1, 2, 4]


def read_map() -> list[tuple[str, str]]:
    text = (CHECKOUT.root / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| I want to change | go to |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[1:]]
    return [(topic.strip(), target.strip()) for topic, target in rows]


def test_map_has_at_least_30_rows() -> None:
    assert len(read_map()) >= 30


@pytest.mark.parametrize(("topic", "target"), read_map())
def test_map_names_existing_files(topic: str, target: str) -> None:
    paths = re.findall(r"`([\w/]+(?:/|\.\w+))`", target)
    assert paths, f"no path for {topic!r}"
    for path in paths:
        pattern = re.sub(r"\b[A-Z]+\b", "*", path).rstrip("/")
        assert list(SOURCE.glob(pattern)), f"{path} does not exist"

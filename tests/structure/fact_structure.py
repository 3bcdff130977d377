"""Figures of `facts.py` about the structure: strategies, core and catalogue. Each function counts
one figure; its docstring says what exactly is counted."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from fact_sources import Import, Source, SourceFile, direct_literals, last_name

#: Packages below the catalogue of strategies, in the order of the layers.
CORE = (
    "cluster", "launch", "simulation", "planner", "train", "observe", "checkpoint", "health",
    "parallel", "tasks", "models", "data", "distributed", "config", "core",
)  # fmt: skip
#: The catalogue: `strategies`, and where its parts are before they move there. The buckets, their
#: layout and the reducer of `ddp` are shared by several strategies and stay in the core.
CATALOGUE = (
    "paceline.strategies",
    "paceline.distributed.collectives",
    *(
        f"paceline.parallel.{name}"
        for name in (
            "compression", "ddp.cost", "ddp.strategy", "ddp.threads", "deepspeed", "fsdp", "hybrid",
            "local_sgd", "parameter_server", "pipeline", "tensor", "zero1",
        )
    ),
)  # fmt: skip
MODES = (
    "single", "dp", "ddp", "zero1", "zero2", "zero3", "fsdp", "deepspeed", "tensor", "pipeline",
    "hybrid", "local_sgd", "diloco", "parameter_server",
)  # fmt: skip
SERVER_TEXTS = (
    "parameter_server", "has_server", "serves", "expendable", "rank_loss", "leader_lost",
    "lost_ranks", "take_over_log",
)  # fmt: skip


# -- strategies
def runtime_checkable(source: Source) -> int:
    """Classes with the decorator `@runtime_checkable`."""
    return sum(
        any(last_name(decorator) == "runtime_checkable" for decorator in node.decorator_list)
        for file in source.files.values()
        for node in file.classes()
    )


def strategy_probes(source: Source) -> int:
    """Calls of `getattr`, `hasattr` and `isinstance` whose first argument is a strategy or its
    reducer, outside `strategies` and `explain`. An expression is one by its last name: `strategy`,
    `reducer`, or `part` of a loop over `parts_of(strategy)`."""
    return sum(
        last_name(call.func) in ("getattr", "hasattr", "isinstance")
        and isinstance(call.func, ast.Name)
        and bool(call.args)
        and last_name(call.args[0]).strip("_") in _names_of_strategies(file)
        for file in source.files.values()
        if file.package not in ("strategies", "explain")
        for call in file.calls()
    )


def _names_of_strategies(file: SourceFile) -> tuple[str, ...]:
    has_parts = any(last_name(call.func) == "parts_of" for call in file.calls())
    return ("strategy", "reducer", "part") if has_parts else ("strategy", "reducer")


def old_strategy_modules(source: Source) -> int:
    """How many of `parallel/base.py` and `parallel/protocols.py` exist."""
    return sum(f"parallel/{name}.py" in source.files for name in ("base", "protocols"))


def strategy_abstract_methods(source: Source) -> int:
    """Methods of the class `Strategy` with the decorator `@abstractmethod`."""
    return sum(
        any(last_name(decorator) == "abstractmethod" for decorator in method.decorator_list)
        for file in source.within("parallel")
        for node in file.classes()
        if node.name == "Strategy"
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    )


# -- core and catalogue
def core_imports_catalogue(source: Source) -> int:
    """Pairs of a module of the core and a module of the catalogue that it imports, anywhere in the
    file."""
    return len(list_catalogue_imports(source))


def list_catalogue_imports(source: Source) -> set[tuple[str, str]]:
    return {
        (each.importer, each.module)
        for each in source.imports
        if each.importer.split(".")[1:2] != []
        and each.importer.split(".")[1] in CORE
        and not _is_in_catalogue(each.importer)
        and _is_in_catalogue(each.module)
    }


def _is_in_catalogue(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in CATALOGUE)


def catalogue_texts_in_core(source: Source) -> int:
    """Occurrences of the text `paceline.strategies` in the packages of the core, except in
    `parallel/registry.py`."""
    return sum(
        file.text.count("paceline.strategies")
        for file in source.within(*CORE)
        if file.name != "parallel/registry.py"
    )


def server_texts(source: Source) -> int:
    """Occurrences of the texts of the parameter server and of lost ranks, also within longer names,
    in code, docstrings and comments of nine packages of the core."""
    packages = (
        "train", "checkpoint", "health", "observe", "launch", "distributed", "core", "data",
        "models",
    )  # fmt: skip
    return sum(file.text.count(text) for file in source.within(*packages) for text in SERVER_TEXTS)


def mode_comparisons(source: Source) -> int:
    """Comparisons with the name of a mode in the packages that train and launch.

    Counted are comparisons (`==`, `!=`, `in`, `not in`) with a literal, or with a tuple, list or
    set of literals, that contains the name of a mode, if one side ends with `mode` or `strategy`
    (also `strategy.name`). Sets with a name of their own are not resolved."""
    packages = (
        "train", "checkpoint", "health", "observe", "launch", "cluster", "distributed", "tasks",
    )  # fmt: skip
    return sum(bool(modes) for _, modes in list_mode_comparisons(source, *packages))


def planner_mode_comparisons(source: Source) -> int:
    """Comparisons of the planner with the name of a mode other than `single`, `ddp` and `hybrid`,
    counted as in `mode_comparisons`."""
    allowed = {"single", "ddp", "hybrid"}
    return sum(bool(modes - allowed) for _, modes in list_mode_comparisons(source, "planner"))


def list_mode_comparisons(source: Source, *packages: str) -> Iterator[tuple[str, set[str]]]:
    """Return each comparison with the names of modes as (place, names)."""
    for file in source.within(*packages):
        for node in file.nodes(ast.Compare):
            sides = [node.left, *node.comparators]
            modes = {text for side in sides for text in direct_literals(side)} & {*MODES}
            if modes and any(map(_is_mode, sides)):
                yield f"{file.name}:{node.lineno}", modes


def _is_mode(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return last_name(node.value) in ("strategy", "mode", "spec")
    return last_name(node).strip("_") in ("mode", "strategy")


def folder_cycles(source: Source) -> int:
    """Groups of neighbors, folders and modules in the same folder, whose modules import each other
    in a circle."""
    return len(list_folder_cycles(source))


def strategy_folder_cycles(source: Source) -> int:
    """Those of `folder_cycles` in `parallel` and `strategies`."""
    return sum(
        group[0].split(".")[1] in ("parallel", "strategies") for group in list_folder_cycles(source)
    )


def list_folder_cycles(source: Source) -> list[list[str]]:
    imports: dict[str, set[str]] = defaultdict(set)
    for each in source.imports:
        if neighbors := _neighbors(each):
            importer, imported = neighbors
            imports[importer].add(imported)
            imports[imported] |= set()
    return find_cycles(imports)


def find_cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(imports[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            start = stack.index(module)
            component, stack[start:] = stack[start:], []
            if len(component) > 1:
                cycles.append(sorted(component))

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return cycles


def _neighbors(each: Import) -> tuple[str, str] | None:
    """Return the folder or module of both modules in their common folder, unless one of the modules
    is that folder's `__init__`."""
    first, second = each.importer.split("."), each.module.split(".")
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    if length == min(len(first), len(second)):
        return None
    return ".".join(first[: length + 1]), ".".join(second[: length + 1])


def private_imports(source: Source) -> int:
    """Imports of a private name (`_name`) of another module, and attributes `module._name`."""
    imported = sum(
        each.name is not None and each.name.startswith("_") and not each.name.startswith("__")
        for each in source.imports
    )
    return imported + sum(map(_private_attributes, source.files.values()))


def _private_attributes(file: SourceFile) -> int:
    modules = {
        alias.asname or alias.name
        for node in file.nodes(ast.ImportFrom)
        if (node.module or "").startswith("paceline")
        for alias in node.names
        if alias.name.islower()
    }
    return sum(
        isinstance(node.value, ast.Name)
        and node.value.id in modules
        and re.match(r"_[^_]", node.attr) is not None
        for node in file.nodes(ast.Attribute)
    )

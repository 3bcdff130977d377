"""Test that pyproject.toml declares every package that the source imports, with an upper bound."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Imported name → name of its distribution, where they differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
#: Not declared: a dependency of torch's GPU builds, of which only the presence is checked; and an
#: engine that users install on their own, because its versions require exact ones of torch.
UNDECLARED = {"triton", "vllm"}
IMPORT_FUNCTIONS = {"import_module", "find_spec", "check_package"}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> Iterator[Requirement]:
    """Return the dependencies and those of all extras for users."""
    extras = PROJECT["optional-dependencies"]
    listed = [text for name, texts in extras.items() if name != "dev" for text in texts]
    yield from map(Requirement, [*PROJECT["dependencies"], *listed])


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in IMPORT_FUNCTIONS
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def test_imported_packages_are_declared() -> None:
    imported = {
        name.partition(".")[0]
        for path in SOURCE.rglob("*.py")
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    packages = imported - sys.stdlib_module_names - {"paceline"} - UNDECLARED
    declared = {normalize(requirement.name) for requirement in requirements()}
    assert "torch" in packages
    assert [
        name
        for name in sorted(packages)
        if normalize(DISTRIBUTIONS.get(name, name)) not in declared
    ] == []


def test_declared_packages_have_an_upper_bound() -> None:
    assert [
        str(requirement)
        for requirement in requirements()
        if not any(each.operator in ("<", "<=", "==", "~=") for each in requirement.specifier)
    ] == []

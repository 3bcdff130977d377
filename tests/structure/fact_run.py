"""Figures of `facts.py` about the way of a run: its plan, native keys, kinds of samples, failures.
Each function counts one figure; its docstring says what exactly is counted."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fact_sources import (
    Source,
    SourceFile,
    direct_literals,
    is_raises_of,
    last_name,
    literal_texts,
)

#: Records that the plan makes superfluous.
SUPERFLUOUS_RECORDS = {
    "TrainOptions", "PreparedHost", "ChosenLayout", "PreparedRun", "LeaderPlan", "RunInfo",
    "Outcome",
}  # fmt: skip
#: Modules that a run passes on its way from the config to the first step.
RUN_PATH = (
    "api.py", "launch/passes/draft.py", "launch/local.py", "launch/passes/checkpoint.py",
    "launch/passes/data.py", "launch/passes/devices.py", "launch/passes/early.py",
    "launch/passes/layout.py", "launch/passes/sizes.py", "launch/plan.py", "launch/results.py",
    "launch/rank_pool.py", "launch/ranks/worker.py", "train/setup.py", "train/trainer.py",
)  # fmt: skip
#: Records whose fields are other records.
WHOLES = {"Draft", "RunSpec"}
#: Records in these modules' signatures that describe a single thing on the way, or how a rank
#: ended, not the run.
DETAILS = {
    "ExitRecord", "Failure", "LossSpike", "MicroBatch", "Notice", "ParallelDims", "Requests",
    "RollbackTarget", "StrategySpec",
}  # fmt: skip
#: Parts of messages of torch, Gloo, NCCL and operating systems about lost peers and devices.
_FOREIGN_ERROR = re.compile(
    r"by peer|broken pipe|connection \(?(closed|reset|refused)|imed(\? \?| )out|\bNCCL\b"
    r"|remote process exited|device-side assert",
    re.IGNORECASE,
)
_REGEX_FUNCTIONS = {"compile", "search", "match", "fullmatch", "findall", "finditer"}
_SAMPLE_FOLDERS = ("data/text/", "data/preference/", "data/vision_language/", "data/kinds/")


# -- the plan
def superfluous_records(source: Source) -> int:
    """How many of the records that the plan replaces still exist as classes."""
    names = {node.name for file in source.files.values() for node in file.classes()}
    return len(names & SUPERFLUOUS_RECORDS)


def records_of_a_run(source: Source) -> int:
    """Records (dataclasses, named tuples, typed dictionaries) that stand in the annotations of the
    parameters and results of functions in the modules that a run passes on its way to the first
    step, except records of a single thing, such as a micro-batch, and the parts of a draft or
    a spec."""
    return len(list_records(source))


def list_records(source: Source) -> set[str]:
    records = {
        node.name for file in source.files.values() for node in file.classes() if _is_record(node)
    }
    annotated = {
        name
        for path in RUN_PATH
        if path in source.files
        for function in source.files[path].functions()
        for annotation in _annotations(function)
        for name in _names(annotation)
    }
    parts = {
        name
        for file in source.files.values()
        for node in file.classes()
        if node.name in WHOLES
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        for name in _names(field.annotation)
    }
    return (records & annotated) - DETAILS - (parts - {"Host", "Loaded"})


def _is_record(node: ast.ClassDef) -> bool:
    decorators, bases = map(last_name, node.decorator_list), map(last_name, node.bases)
    return "dataclass" in decorators or bool({"NamedTuple", "TypedDict"} & set(bases))


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    yield from (each.annotation for each in listed if each.annotation is not None)
    if function.returns is not None:
        yield function.returns


def _names(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)


def nonlocal_statements(source: Source) -> int:
    """Statements `nonlocal` in `launch` and `api.py`."""
    return sum(len(list(file.nodes(ast.Nonlocal))) for file in source.within("launch", "api"))


def long_signatures(source: Source) -> int:
    """Functions of `launch` and `api.py` with more than 6 parameters, `self` included and `*args`
    and `**kwargs` not."""
    return sum(
        len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > 6
        for file in source.within("launch", "api")
        for node in file.functions()
    )


def callback_registrations(source: Source) -> int:
    """Calls of `callbacks.add` and `callbacks.add_user` outside `train/callback_setup.py`."""
    return sum(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("add", "add_user")
        and last_name(call.func.value) == "callbacks"
        for file in source.files.values()
        if file.name != "train/callback_setup.py"
        for call in file.calls()
    )


def unsupported_modes_in_launch(source: Source) -> int:
    """Statements `raise ConfigError` in `launch` that say that a mode or the parameter server `is
    not supported`."""
    return sum(
        "is not supported" in text
        and ("`parallel.mode:" in text or "`parameter_server." in text.partition("fix")[0])
        for file in source.within("launch")
        for node in file.nodes(ast.Raise)
        if isinstance(node.exc, ast.Call) and node.exc.args
        for text in ["".join(literal_texts(node.exc.args[0]))]
    )


# -- native keys
_LOAD_CODE = """
import json, sys
from paceline.config.load import load_config

called = set()


def record(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        called.add(frame.f_code.co_filename)


sys.setprofile(record)
load_config(sys.argv[1], ["train_args.learning_rate=1e-3"])
sys.setprofile(None)
print(json.dumps([sorted(called), sorted(sys.modules)]))
"""
_NATIVE = """\
model: builtin:qwen2-micro
dataset: builtin:python-docs
output_dir: ./output/run
train_args:
  max_steps: 3
"""


@cache
def _load_native_config(root: Path) -> tuple[list[str], list[str]]:
    """Load a file of native keys with a native override in a new process. Return the files of
    `src/paceline` whose functions ran, and the modules that were imported."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(_NATIVE, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", _LOAD_CODE, str(file)],
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
    called, modules = json.loads(done.stdout)
    package = root / "src" / "paceline"
    paths = [Path(name) for name in called]
    names = [path.relative_to(package).as_posix() for path in paths if path.is_relative_to(package)]
    return names, modules


def files_of_native_load(source: Source) -> int:
    """Files outside `config/schema` of which a function is called while a file of native keys is
    loaded with a native override (`sys.setprofile`; bodies of modules do not count)."""
    return len(list_files_of_native_load(source))


def list_files_of_native_load(source: Source) -> list[str]:
    names = _load_native_config(source.root)[0]
    return [name for name in names if not name.startswith("config/schema/")]


def compat_files_of_native_load(source: Source) -> int:
    """Those of `files_of_native_load` in `config/compat`."""
    names = list_files_of_native_load(source)
    return sum(name.startswith("config/compat/") for name in names)


def compat_imports_of_native_load(source: Source) -> int:
    """Modules of `config/compat`, the package included, that are imported by that load."""
    modules = _load_native_config(source.root)[1]
    return sum(f"{name}.".startswith("paceline.config.compat.") for name in modules)


def parsed_messages(source: Source) -> int:
    """Places in `config` that read the text of the program's own errors: calls of a method of text,
    slices, `in` and regular expressions on the attribute `what`, `allowed` or `fix`."""
    return sum(map(_count_parsed, source.within("config")))


def _count_parsed(file: SourceFile) -> int:
    parsers = {"split", "partition", "rpartition", "startswith", "endswith", "find", "index"}
    count = 0
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_method = node.func.attr in parsers and _is_message(node.func.value)
            is_regex = node.func.attr in _REGEX_FUNCTIONS and any(map(_is_message, node.args))
            count += is_method or is_regex
        elif isinstance(node, ast.Compare):
            count += any(map(_is_message, node.comparators))
    return count


def _is_message(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("what", "allowed", "fix")


def tests_matching_messages(source: Source) -> int:
    """Calls of `pytest.raises` in the tests with `ConfigError` and `match=`."""
    return sum(
        is_raises_of(call, "ConfigError") and any(each.arg == "match" for each in call.keywords)
        for file in source.tests.values()
        for call in file.calls()
    )


def tests_matching_codes(source: Source) -> int:
    """Places in the tests that read the code of a ConfigError: calls with `ConfigError` among their
    arguments and the keyword `code`, and attributes `value.code` of the result of
    `pytest.raises(ConfigError)`."""
    return sum(map(_count_codes, source.tests.values()))


def _count_codes(file: SourceFile) -> int:
    results = {
        item.optional_vars.id
        for node in file.nodes(ast.With)
        for item in node.items
        if is_raises_of(item.context_expr, "ConfigError")
        and isinstance(item.optional_vars, ast.Name)
    }
    attributes = sum(
        node.attr == "code"
        and last_name(node.value) == "value"
        and isinstance(node.value, ast.Attribute)
        and last_name(node.value.value) in results
        for node in file.nodes(ast.Attribute)
    )
    return attributes + sum(
        any(last_name(argument) == "ConfigError" for argument in call.args)
        and any(each.arg == "code" for each in call.keywords)
        for call in file.calls()
    )


# -- kinds of samples
def fields_of(source: Source, name: str) -> int:
    """Return the number of annotated fields of a class in `data`; 0 if there is no such class."""
    return sum(
        isinstance(statement, ast.AnnAssign)
        for file in source.within("data")
        for node in file.classes()
        if node.name == name
        for statement in node.body
    )


def sample_fields(source: Source) -> int:
    """Fields of the class `Sample`."""
    return fields_of(source, "Sample")


def encoded_fields(source: Source) -> int:
    """Fields of the class `Encoded`."""
    return fields_of(source, "Encoded")


def chunk_fields(source: Source) -> int:
    """Fields of the class `EncodedChunk`."""
    return fields_of(source, "EncodedChunk")


def token_datasets(source: Source) -> int:
    """Classes named `…Dataset` in the folders of samples that are tokenized."""
    return _count_classes(source, "Dataset")


def token_writers(source: Source) -> int:
    """Classes named `…Writer` in the folders of samples that are tokenized."""
    return _count_classes(source, "Writer")


def _count_classes(source: Source, suffix: str) -> int:
    return sum(
        node.name.endswith(suffix)
        for name, file in source.files.items()
        if name.startswith(_SAMPLE_FOLDERS)
        for node in file.classes()
    )


def orders(source: Source) -> int:
    """Public classes named `…Order` in `data`, except protocols and abstract classes."""
    return sum(
        node.name.endswith("Order")
        and not node.name.startswith("_")
        and {"ABC", "Protocol"}.isdisjoint(map(last_name, node.bases))
        for file in source.within("data")
        for node in file.classes()
    )


# -- failures
def modules_with_error_patterns(source: Source) -> int:
    """Modules that recognize failures by messages of torch, Gloo and NCCL: with such a text as an
    operand of `in`, or in the pattern of a regular expression."""
    return len(list_modules_with_error_patterns(source))


def list_modules_with_error_patterns(source: Source) -> list[str]:
    return [
        file.name
        for file in source.files.values()
        if any(_FOREIGN_ERROR.search(text) for text in _patterns(file))
    ]


def _patterns(file: SourceFile) -> Iterator[str]:
    for node in file.nodes(ast.Compare, ast.Call):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            yield from direct_literals(node.left)
        elif isinstance(node, ast.Call) and _is_regex(node.func) and node.args:
            yield from literal_texts(node.args[0])


def _is_regex(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _REGEX_FUNCTIONS
        and last_name(function.value) == "re"
    )

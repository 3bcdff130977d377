"""Record what a command does until its first step. Python imports this module when it starts if
this folder is in PYTHONPATH; `benchmarks/startup.py` reads the records.

Each process appends JSON lines to PACELINE_STARTUP_TRACE/PID.jsonl: its start, the modules that it
executes with the module that imported each first, and the calls of the functions in `CALLS`.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("PACELINE_STARTUP_TRACE")
#: module → function or method → what it does
CALLS: dict[str, dict[str, str]] = {
    "paceline.commands.options": {"load_job_config": "read and check the config"},
    "paceline.launch.fork_server": {"start_fork_server": "start the fork server"},
    "paceline.launch.plan": {"plan": "plan the run: devices, layout, data, sizes, checkpoint"},
    "paceline.data.encoding.prepare": {"prepare_tokens": "tokenize the data"},
    "paceline.launch.ranks.processes": {
        "RankProcesses.start": "start the ranks (waits for the fork server)"
    },
    "paceline.distributed.communicator": {"init_communicator": "process group"},
    "paceline.models.language": {"load_language_model": "construct the model, read its weights"},
    "paceline.models.adapters.lora": {"add_adapters": "add LoRA"},
    "paceline.models.checks.packing": {"choose_packing": "check that packed samples do not mix"},
    "paceline.train.optimizers.build": {"build_optimizer": "create the optimizer"},
    "paceline.train.components": {
        "build_components": "build model, data, strategy, optimizer",
        "distribute": "distribute the model",
    },
    "paceline.train.setup": {"build_trainer": "build the trainer"},
    "paceline.train.trainer": {"Trainer.run_step": "step"},
}

_local = threading.local()


def write(*records: dict[str, Any]) -> None:
    assert FOLDER is not None
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def recorded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function, with each call recorded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        depth = _local.__dict__.setdefault("depth", 0)
        _local.depth, start = depth + 1, time.time()
        try:
            return function(*args, **kwargs)
        finally:
            _local.depth = depth
            write({"call": name, "start": start, "end": time.time(), "depth": depth})

    return call


def record_calls(module: ModuleType) -> None:
    for path, name in CALLS.get(module.__name__, {}).items():
        *parents, last = path.split(".")
        owner = functools.reduce(getattr, parents, module)
        setattr(owner, last, recorded(getattr(owner, last), name))


class Importing:
    """The modules that a thread is executing, and the records of those that it has executed."""

    def __init__(self) -> None:
        self.stack: list[list[Any]] = []  # name, seconds of the modules that it imports
        self.records: list[dict[str, Any]] = []

    def execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        importer = self.stack[-1][0] if self.stack else None
        self.stack.append([module.__name__, 0.0])
        start = time.perf_counter()
        try:
            execute(module)
        finally:
            seconds = time.perf_counter() - start
            _, nested_s = self.stack.pop()
            if self.stack:
                self.stack[-1][1] += seconds
            self.records.append(
                {"module": module.__name__, "importer": importer, "seconds": seconds - nested_s}
            )
            if not self.stack:
                write(*self.records)
                self.records = []


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules in sys.path, as Python does, and times their execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if isinstance(
            loader,
            importlib.machinery.SourceFileLoader | importlib.machinery.ExtensionFileLoader,
        ):
            execute = loader.exec_module

            def timed(module: ModuleType) -> None:
                importing = _local.__dict__.setdefault("importing", Importing())
                importing.execute(execute, module)
                record_calls(module)

            loader.exec_module = timed  # type: ignore[method-assign]
        return spec


if FOLDER is not None:
    write({"python": time.time(), "parent": os.getppid(), "arguments": sys.orig_argv})
    sys.meta_path.insert(0, Finder())

"""What every test can rely on, and what every test must leave as it found it."""

import contextlib
import math
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from alone import turn
from not_run import NOT_RUN, note
from slurm_cluster import why_not

# Before anything imports a library that looks at them. The cache is shared by the whole session, so
# that the built-in model, its tokenizer and its data are built once; Hugging Face's caches follow
# XDG_CACHE_HOME.
_CACHE = tempfile.mkdtemp(prefix="paceline-tests-")
_TOKEN = uuid.uuid4().hex
os.environ["XDG_CACHE_HOME"] = _CACHE
os.environ["HF_HUB_OFFLINE"] = "1"
# inherited by every process that a test starts, orphans too
os.environ["PACELINE_TEST_SESSION"] = _TOKEN
for _name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE"):
    os.environ.pop(_name, None)
for _name in (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
):
    os.environ.pop(_name, None)

# Set by pytest itself, and by scikit-learn and torch's compiler the first time they are imported.
_MAY_CHANGE = {
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
}
# Helpers that multiprocessing keeps for the life of its parent. A fork server's workers are not
# exempt: their parent is it.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "command_server.py")
_GRACE_S = 5.0


#: `--soak-part` runs one of these; each has every NUM_SOAK_PARTS-th test of the soak set.
NUM_SOAK_PARTS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-part",
        type=int,
        choices=range(NUM_SOAK_PARTS),
        help=f"run this part of the soak tests, 0 to {NUM_SOAK_PARTS - 1}, beside the others",
    )


def _outside_part(config: pytest.Config, soak: list[pytest.Item]) -> list[pytest.Item]:
    """The soak tests that this run leaves out."""
    part = config.option.soak_part
    if part is None:
        return [] if "soak" in config.option.markexpr else soak
    in_order = sorted(soak, key=lambda item: item.nodeid)
    return [item for number, item in enumerate(in_order) if number % NUM_SOAK_PARTS != part]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort out the tests that do not run: ``gpu`` without an accelerator, ``slurm`` without Slurm's
    programs, ``soak`` unless ``-m soak`` or ``--soak-part`` asks for them."""
    marked = {
        marker: [item for item in items if item.get_closest_marker(marker)]
        for marker in ("gpu", "slurm", "soak")
    }
    left_out = {
        "gpu": [] if _accelerator() else marked["gpu"],
        "slurm": [] if why_not() is None else marked["slurm"],
        "soak": _outside_part(config, marked["soak"]),
    }
    lines = {
        "gpu": "No accelerator on this machine: {} test(s) marked gpu were not run.",
        "slurm": f"NOT RUN: {{}} test(s) on a real Slurm: {why_not()}.",
        "soak": "{} test(s) marked soak were not run; `make soak` runs them.",
    }
    for marker, tests in left_out.items():
        if tests:
            note(config, marker, lines[marker].format(len(tests)))
    deselected = {item for tests in left_out.values() for item in tests}
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=list(deselected))
    # Quick tests first, then files with much to do before those with little: two workers that take
    # files in turn then finish at about the same time.
    for item in marked["soak"] if config.option.soak_part is not None else ():
        # They inject faults and share the machine with others. The summary names each that ran
        # twice.
        item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))
    num_slow = Counter(item.path for item in items if _is_slow(item))
    items.sort(
        key=lambda item: num_slow[item.path] if _is_slow(item) else math.inf,
        reverse=True,
    )


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(marker) for marker in ("slow", "soak"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash.get(NOT_RUN, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    for kind, line in getattr(node, "workeroutput", {}).get("not_run", {}).items():
        note(node.config, kind, line)


def _accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(NOT_RUN, {}).values():
        loud = line.startswith("NOT RUN")
        terminalreporter.write_line(line, red=loud, bold=loud)


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def a_turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Some tests have the machine to themselves, where workers of pytest-xdist run side by side."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # of all workers
    with turn(Path(folder), alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(autouse=True)
def no_process_left(a_turn: None) -> Iterator[None]:
    """Fail a test that leaves a process running: a child, or one further down whose parent is
    gone."""
    before = set(psutil.pids())
    yield
    left = _processes(set(psutil.pids()) - before)
    _, left = psutil.wait_procs(left, timeout=_GRACE_S) if left else ([], [])
    left = [process for process in left if _alive(process)]
    if left:
        names = [_describe(process) for process in left]
        for process in left:
            _kill(process)
        psutil.wait_procs(left, timeout=_GRACE_S)
        pytest.fail(f"the test left {len(left)} process(es) running: " + "; ".join(names))


@pytest.fixture(autouse=True)
def no_environment_change() -> Iterator[None]:
    """Fail a test that leaves an environment variable set, changed or removed; put them back for
    the next one."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    changed = [name for name in changed if name not in _MAY_CHANGE]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)
    if changed:
        pytest.fail(
            "the test changed the environment: " + ", ".join(changed) + "; use monkeypatch.setenv"
        )


def _processes(pids: set[int]) -> list[psutil.Process]:
    """Those that live and were started by this session, whoever their parent is now, without
    multiprocessing's own helpers."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if _is_of_session(process) and _alive(process) and not _is_helper(process):
                processes.append(process)
    return processes


def _is_of_session(process: psutil.Process) -> bool:
    if any(parent.pid == os.getpid() for parent in process.parents()):
        return True
    return process.environ().get("PACELINE_TEST_SESSION") == _TOKEN


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_helper(process: psutil.Process) -> bool:
    try:
        command_line = " ".join(process.cmdline())
        if "chrom" in command_line and " --type=" in command_line:
            # the session's browser starts and ends its helpers when it likes; the browser itself
            # has no type
            return True
        return process.ppid() == os.getpid() and any(name in command_line for name in _HELPERS)
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()

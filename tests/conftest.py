"""Configure all tests: the environment, which tests run, the machine lock, and checks that a test
leaves no process running and no environment variable changed.

GPUs are hidden, except with ``-m gpu``: the other tests use CPU ranks on every machine."""

import contextlib
import logging
import math
import os
import shutil
import sys
import tempfile
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from long_tests import DurationRecorder, long_items
from machine_lock import lock_machine
from not_run import NOT_RUN, record_not_run
from simulation_cache import build_libraries, compile_shared
from slurm_cluster import missing_requirement

# Set before any import of a library that reads these variables. All tests share the cache, also
# those of other workers of pytest-xdist, so that the built-in model, its tokenizer and its data are
# built once. Hugging Face's caches are below XDG_CACHE_HOME.
_IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IS_XDIST_WORKER:
    _CACHE = os.environ["XDG_CACHE_HOME"]
else:
    _CACHE = tempfile.mkdtemp(prefix="paceline-tests-")
_TOKEN = uuid.uuid4().hex
os.environ["XDG_CACHE_HOME"] = _CACHE
os.environ["HF_HUB_OFFLINE"] = "1"
# Threads of torch that wait for each other sleep instead of spinning: two workers and their ranks
# share the cores. It does not change any result.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inherited by every process that a test starts, including orphans.
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

# Set by pytest, and by scikit-learn and torch's compiler when they are first imported.
_MAY_CHANGE = {
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
# Helper processes that run until pytest ends. Workers of a fork server are not exempt: their parent
# is the fork server.
_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "command_server.py",
    "torchvision_server.py",
)
_GRACE_S = 5.0


# Device files of the drivers of NVIDIA and AMD.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


#: Number of parts for `--soak-part`. The part of a test follows from its name, so that it stays
#: the same when other tests are added.
NUM_SOAK_PARTS = 16


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-part",
        type=int,
        choices=range(NUM_SOAK_PARTS),
        help=f"also run this part of the soak tests, 0 to {NUM_SOAK_PARTS - 1}",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long the tests take to tests/durations.json; long ones are soak tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_durations and not _IS_XDIST_WORKER:
        config.pluginmanager.register(DurationRecorder())
    if _hides_gpus(config):
        # Read when torch initializes CUDA, which is later. Processes of tests inherit it.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = "-1"


def _hides_gpus(config: pytest.Config) -> bool:
    return "gpu" not in config.option.markexpr and any(map(os.path.exists, _GPU_DRIVERS))


def _names_tests(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


def _excluded_soak_tests(config: pytest.Config, soak: list[pytest.Item]) -> list[pytest.Item]:
    """Return the soak tests that this session does not run."""
    part = config.option.soak_part
    if "soak" in config.option.markexpr or _names_tests(config):
        return []
    if part is None:
        return soak
    return [item for item in soak if zlib.crc32(item.nodeid.encode()) % NUM_SOAK_PARTS != part]


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``gpu`` without an accelerator, ``slurm`` without Slurm's programs, and
    ``soak`` without ``-m soak`` or ``--soak-part``; then order the rest.

    A test that is named on the command line runs, however long it takes."""
    for item in long_items(items):
        item.add_marker(pytest.mark.soak)
    marked = {
        marker: [item for item in items if item.get_closest_marker(marker)]
        for marker in ("gpu", "slurm", "soak")
    }
    excluded = {
        "gpu": [] if _has_accelerator() else marked["gpu"],
        "slurm": [] if missing_requirement() is None else marked["slurm"],
        "soak": _excluded_soak_tests(config, marked["soak"]),
    }
    no_gpu = "No accelerator on this machine: {} test(s) marked gpu were not run."
    if _hides_gpus(config):
        no_gpu = "{} test(s) marked gpu were not run; `make test-gpu` runs them."
    lines = {
        "gpu": no_gpu,
        "slurm": f"NOT RUN: {{}} test(s) on a real Slurm: {missing_requirement()}.",
        "soak": "{} test(s) marked soak were not run; `make soak` runs them.",
    }
    for marker, tests in excluded.items():
        if tests:
            record_not_run(config, marker, lines[marker].format(len(tests)))
    deselected = {item for tests in excluded.values() for item in tests}
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=list(deselected))
    for item in marked["soak"] if config.option.soak_part is not None else ():
        # These tests inject faults while other tests run, so they may fail once. The summary lists
        # each one that was run again.
        item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))
    # Fast tests first, then the files with the most slow tests, so that two workers that take turns
    # finish at about the same time.
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
    """Collect the summary lines of a pytest-xdist worker that has ended."""
    for kind, line in getattr(node, "workeroutput", {}).get("not_run", {}).items():
        record_not_run(node.config, kind, line)


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(NOT_RUN, {}).values():
        is_warning = line.startswith("NOT RUN")
        terminalreporter.write_line(line, red=is_warning, bold=is_warning)


def pytest_unconfigure() -> None:
    if not _IS_XDIST_WORKER:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def compiled_shim(pytestconfig: pytest.Config) -> None:
    """Compile the shim of simulated CUDA, unless an earlier session has compiled it."""
    from paceline.simulation.cuda import SHIM

    compile_shared(pytestconfig, lambda: build_libraries(SHIM))


@pytest.fixture(autouse=True)
def machine_access(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Run tests marked ``alone`` while no other worker of pytest-xdist runs a test."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # shared by all workers
    is_alone = request.node.get_closest_marker("alone") is not None
    with lock_machine(Path(folder), exclusive=is_alone):
        yield


@pytest.fixture(autouse=True)
def no_leaked_process(machine_access: None) -> Iterator[None]:
    """Fail a test that leaves a process running, including an orphan."""
    before = set(psutil.pids())
    yield
    leaked = _session_processes(set(psutil.pids()) - before)
    _, leaked = psutil.wait_procs(leaked, timeout=_GRACE_S) if leaked else ([], [])
    leaked = [process for process in leaked if _is_alive(process)]
    if leaked:
        descriptions = [_describe(process) for process in leaked]
        for process in leaked:
            _kill(process)
        psutil.wait_procs(leaked, timeout=_GRACE_S)
        pytest.fail(f"the test left {len(leaked)} process(es) running: " + "; ".join(descriptions))


@pytest.fixture(autouse=True)
def visible_packages() -> Iterator[None]:
    """Let the next test find the packages that a command in this process has hidden."""
    yield
    user_code = sys.modules.get("paceline.core.user_code")
    if user_code is not None:
        user_code.show_packages()


@pytest.fixture(autouse=True)
def package_logger() -> Iterator[None]:
    """Let records reach ``caplog`` in the next test, even if a command in this process prints
    them."""
    log = logging.getLogger("paceline")
    before = log.propagate, log.level, log.handlers[:]
    yield
    log.propagate, level, log.handlers[:] = before
    log.setLevel(level)


@pytest.fixture(autouse=True)
def no_environment_change() -> Iterator[None]:
    """Fail a test that leaves an environment variable set, changed or removed; restore them for the
    next test."""
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


def _session_processes(pids: set[int]) -> list[psutil.Process]:
    """Return the running processes among ``pids`` that this session has started, including orphans,
    without the helpers of multiprocessing."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if _is_from_session(process) and _is_alive(process) and not _is_helper(process):
                processes.append(process)
    return processes


def _is_from_session(process: psutil.Process) -> bool:
    if any(parent.pid == os.getpid() for parent in process.parents()):
        return True
    return process.environ().get("PACELINE_TEST_SESSION") == _TOKEN


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_helper(process: psutil.Process) -> bool:
    try:
        command_line = " ".join(process.cmdline())
        if "chrom" in command_line and " --type=" in command_line:
            # The session's browser starts and ends its helpers at any time. The browser process
            # itself has no `--type`.
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

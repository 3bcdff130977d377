"""Compile C++ sources against the installed torch, once per source and release."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch
from packaging.requirements import Requirement

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import cache_dir
from paceline.data.cache import build_once, key_of

#: The shim replaces private names of torch, so each release is tried before it is added here.
SUPPORTED = "torch>=2.13,<2.14"
OTHER_ENVIRONMENT = (
    "install Paceline in another environment with the CPU build (`pip install"
    f" '{SUPPORTED}' --index-url https://download.pytorch.org/whl/cpu`); for `paceline plan"
    " --simulate`, set PACELINE_SIMULATION_PYTHON to its `python`"
)
_INCLUDES = ("include", "include/torch/csrc/api/include")
_ERROR_CHARS = 2000


class SimulationError(ConfigError):
    """CUDA cannot be simulated with this machine's compiler or torch."""


def check_release() -> None:
    """Check the release of torch. Call it before importing :mod:`paceline.simulation.cuda`, which
    imports private names of torch.

    Raises:
        SimulationError: devices cannot be simulated with the installed release.
    """
    if not Requirement(SUPPORTED).specifier.contains(torch.__version__, prereleases=True):
        raise SimulationError(
            "devices cannot be simulated with torch {version}",
            code="simulation-with-torch-version",
            allowed=SUPPORTED,
            fix=OTHER_ENVIRONMENT,
            version=torch.__version__,
        )


def check_build() -> None:
    """Check that the CPU build of torch is installed. Call it before devices are simulated, because
    they are indistinguishable from real ones afterwards.

    Raises:
        SimulationError: a GPU build is installed.
    """
    build = torch.version.cuda or torch.version.hip
    if build is not None or torch.accelerator.is_available():
        raise SimulationError(
            "torch {version} is a GPU build, and devices can be simulated only with the CPU build",
            code="simulation-with-gpu-build",
            fix=OTHER_ENVIRONMENT,
            version=torch.__version__,
        )


def build_library(source: Path) -> Path:
    """Return the shared library compiled from a C++ source, from the cache if it has been compiled
    before. It takes 10 to 40 s to compile one. If several processes call this, one compiles and
    the others wait.

    Raises:
        SimulationError: there is no compiler, torch's headers are missing, or it fails.
        ConfigError: the cache folder is not writable.
    """
    compiler, name = _compiler(), f"{source.stem}.so"
    folder = cache_dir() / "simulation"
    folder /= key_of([source.read_text(encoding="utf-8"), torch.__version__, compiler])
    build_once(folder, name, lambda staging: _compile(compiler, source, staging / name))
    return folder / name


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, or the first that is installed."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise SimulationError(
        "simulated CUDA needs a C++ compiler, and none was found",
        code="simulation-without-compiler",
        allowed="g++ or clang++ with C++20",
        fix="install one (Debian and Ubuntu: `apt-get install g++`), or set CXX",
    )


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    if not (root / "include" / "ATen" / "ATen.h").is_file():
        raise SimulationError(
            "simulated CUDA needs the C++ headers of torch, which {root} does not have",
            code="simulation-without-headers",
            fix="install torch with pip; its wheels have the headers",
            root=root,
        )
    command = [
        *compiler,
        *("-O1", "-std=c++20", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1"),
        *(f"-I{root / include}" for include in _INCLUDES),
        *(str(source), "-o", str(target), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise SimulationError(
            "the C++ compiler `{compiler}` cannot be started: {reason}",
            code="simulation-compiler-failed",
            fix="set CXX to the command of a C++ compiler",
            compiler=shlex.join(compiler),
            reason=first_line(error),
        ) from error
    if done.returncode:
        raise SimulationError(
            "`{compiler}` cannot compile {source} against torch {version}: {stderr}",
            code="simulation-not-compiled",
            allowed="g++ or clang++ with C++20",
            compiler=shlex.join(compiler),
            source=source.name,
            version=torch.__version__,
            stderr=done.stderr.strip()[-_ERROR_CHARS:],
        )

"""Call functions in a process that can import torchvision, which no other test can.

As a script: for each line {module, function, args} on standard input, write a line with the error,
or null.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENVIRONMENT = Path(__file__).with_name("torchvision_only")


def torchvision_environment() -> dict[str, str]:
    """Return the environment of a process that can import torchvision."""
    paths = [str(_ENVIRONMENT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class TorchvisionServer:
    """The process, which starts with the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of a module. Paths become texts; an error fails the test."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=torchvision_environment(),
            )
        request = {"module": function.__module__, "function": function.__name__, "args": args}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        error = json.loads(self._process.stdout.readline() or '"the process has ended"')
        assert error is None, error

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)


def _serve() -> None:
    sys.path.extend(path for path in sys.argv[1:] if path not in sys.path)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        error = None
        try:
            function = getattr(importlib.import_module(request["module"]), request["function"])
            function(*request["args"])
        except BaseException:
            error = traceback.format_exc()
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()

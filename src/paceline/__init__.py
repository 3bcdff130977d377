"""Paceline: one YAML file, one command, any PyTorch model on every device you have.

From Python::

    import paceline
    report = paceline.train("config.yaml", **{"train_args.max_steps": 100})

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.version import __version__

__all__ = ["Callback", "Task", "__version__", "plan", "train"]

if TYPE_CHECKING:
    from paceline.api import train
    from paceline.planner.api import plan
    from paceline.tasks.base import Task
    from paceline.train.callbacks.base import Callback

_MODULES = {
    "train": "paceline.api",
    "plan": "paceline.planner.api",
    "Callback": "paceline.train.callbacks.base",
    "Task": "paceline.tasks.base",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


class _Package(ModuleType):
    """Importing the package ``paceline.train`` does not replace the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle (Ray, dask) knows modules by their exact type.
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

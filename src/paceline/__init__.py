"""Paceline: one YAML file, one command, any PyTorch model on every device you have.

From Python::

    import paceline
    report = paceline.train("config.yaml", **{"train_args.max_steps": 100})

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Task", "__version__", "plan", "train"]

if TYPE_CHECKING:
    from paceline.launch.api import train
    from paceline.tasks.base import Task


def __getattr__(name: str) -> Any:
    if name == "train":
        from paceline.launch.api import train

        return train
    if name == "Task":
        from paceline.tasks.base import Task

        return Task
    if name == "plan":
        from importlib import import_module

        return import_module("paceline.plan")  # the package of that name can be called
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")

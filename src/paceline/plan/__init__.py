"""What a run would take before it starts: memory, traffic and time under every mode, and the mode that ``auto`` takes.

The package is called as a function, too: ``paceline.plan("mine.yaml", world_size=8, device_memory="24GB")``. Importing it
imports no torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from paceline.plan.api import plan
from paceline.plan.choose import pick
from paceline.plan.layouts import candidates

__all__ = ["candidates", "pick", "plan"]


class _Callable(ModuleType):
    """`paceline.plan` is this package's name and a function's: Python binds a package to its parent when it is imported."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

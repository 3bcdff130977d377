"""Make torchvision importable beside the CPU build of torch: only processes that have this folder
on PYTHONPATH run this file at their start.

PyPI's torchvision is built for CUDA. Its Python part works without its operators, two of which must
be declared for its import.
"""

import importlib.abc
import sys
from pathlib import Path

#: Where `make setup` installs torchvision.
FOLDER = Path(sys.prefix) / "vision-only"
_operators: list[object] = []


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    _operators.append(library)  # the operators exist as long as the library


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torchvision" and not _operators:
            _declare_operators()


sys.path.append(str(FOLDER))
sys.meta_path.insert(0, _BeforeTorchvision())

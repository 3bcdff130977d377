"""Weights that are read one at a time, and how they are changed before they are written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.models.weights.stored_files import read_header, weight_files

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Weight:
    """A weight that is read when it is needed.

    Args:
        name: its name, with ``.weight`` or ``.bias`` at the end where it has that.
        shape: its shape as in torch.
        load: reads it.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> Weight:
        """Return the weight that a function makes of it.

        Args:
            name: the new name; by default the same.
        """
        import torch

        shape = tuple(function(torch.empty(self.shape, device="meta")).shape)
        load = self.load
        return Weight(name or self.name, shape, lambda: function(load()))

    def renamed(self, name: str) -> Weight:
        """Return the weight with another name."""
        return replace(self, name=name)


def stored_weights(folder: Path) -> list[Weight]:
    """Return the weights in the safetensors files of a folder, in the order of their names."""
    weights = []
    for file in weight_files(folder):
        entries, _ = read_header(file)
        for name, entry in entries.items():
            weights.append(Weight(name, tuple(entry["shape"]), _reader(file, name)))
    return sorted(weights, key=lambda weight: _order(weight.name))


def _reader(file: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    return read


def _order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def stack_experts(weights: Iterable[Weight]) -> Iterator[Weight]:
    """Replace the weights ``….experts.N.NAME`` by stacks ``….experts.NAME`` [experts, …]."""
    groups: dict[str, dict[int, Weight]] = defaultdict(dict)
    for weight in weights:
        match = _EXPERT.match(weight.name)
        if match:
            groups[f"{match[1]}.{match[3]}"][int(match[2])] = weight
        else:
            yield weight
    for name, by_number in groups.items():
        yield _stacked(name, [by_number[number] for number in sorted(by_number)])


def _stacked(name: str, weights: list[Weight]) -> Weight:
    def load() -> torch.Tensor:
        import torch

        return torch.stack([weight.load() for weight in weights])

    return Weight(name, (len(weights), *weights[0].shape), load)

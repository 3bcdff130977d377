"""The positions of the tokens of a packed row with images, by the model's own function."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.models.blocks import base_model


@dataclass(frozen=True)
class ImagePositions:
    """The function with which a model computes the positions of the tokens of images, without the
    model: a batch is collated on the host, possibly in another process. In a model with this
    function (Qwen, GLM), a token of an image has a time, a row and a column.

    Args:
        kind: class of the model.
        config: config of the model.
    """

    kind: type[nn.Module]
    config: Any

    def row(
        self, types: Sequence[torch.Tensor], grids: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the positions of a packed row, int64 [4, 1, tokens]: in the sample, from which
        these models see where samples begin, followed by time, row and column.

        Args:
            types: for each sample, the kind of each token [tokens].
            grids: for each sample, the sizes of its images [images, 3], or None.
        """
        shell: Any = self.kind.__new__(self.kind)
        nn.Module.__init__(shell)
        shell.config = self.config
        parts = []
        for of_sample, grid in zip(types, grids, strict=True):
            of_row = of_sample.unsqueeze(0)
            # The token IDs are read for their number only.
            positions, _ = shell.get_rope_index(of_row, of_row, image_grid_thw=grid)
            in_sample = torch.arange(of_row.shape[1]).view(1, 1, -1)
            parts.append(torch.cat([in_sample, positions]))
        return torch.cat(parts, dim=2)


def image_positions(model: Any) -> ImagePositions | None:
    """Return how a model computes the positions of the tokens of images, or None if it numbers all
    tokens alike."""
    inner: Any = getattr(base_model(model), "model", None)
    function = getattr(type(inner), "get_rope_index", None)
    if function is None:
        return None
    names = list(inspect.signature(function).parameters)
    is_known = names[:4] == ["self", "input_ids", "mm_token_type_ids", "image_grid_thw"]
    return ImagePositions(type(inner), inner.config) if is_known else None

"""Give every rank the same weights before training."""

import hashlib
import logging

import torch
from torch import nn

from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.models.weights.load import convert_weights, is_from_files

logger = logging.getLogger(__name__)

#: Number of elements at the start and at the end of each weight that are compared between ranks.
_NUM_COMPARED = 16


def sync_weights(model: nn.Module, world: Communicator) -> None:
    """Copy rank 0's weights and buffers to the other ranks, in place. A collective.

    Weights that every rank read from equal files are not sent, so ranks continue to share the pages
    of these files.
    """
    if world.size == 1:
        return
    from_files = {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_from_files(parameter) and not parameter.is_meta
    }
    digests = world.gather_objects(_digest(from_files))
    others = [tensor for name, tensor in model.named_parameters() if name not in from_files]
    if len(set(digests)) > 1:
        logger.warning(
            UserText(
                "model: the ranks loaded different weights, so rank 0 sends its weights to the"
                " others; copy the same files to every host to avoid this",
                code="different-initial-weights",
            )
        )
        convert_weights(model.parameters())
        others = list(model.parameters())
    world.broadcast([*others, *model.buffers()])


def _digest(weights: dict[str, nn.Parameter]) -> str:
    """Return a digest of the names and shapes of weights, and of some of their elements."""
    digest = hashlib.sha256()
    ends = []
    for name, parameter in weights.items():
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        values = parameter.detach().reshape(-1)
        ends += [values[:_NUM_COMPARED].float(), values[-_NUM_COMPARED:].float()]
    if ends:
        digest.update(torch.cat(ends).cpu().numpy().tobytes())
    return digest.hexdigest()

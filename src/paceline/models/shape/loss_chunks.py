"""Of how many tokens the loss of a language model is computed at a time. Imports no torch."""

import sys
from typing import NamedTuple

from paceline.config.schema.train_args import TrainArgs

#: Size of the logits of a chunk, in float32. With smaller chunks, the gradient of the head's weight
#: is read and written more often, which takes longer; on accelerators, each chunk also takes the
#: time to launch its kernels.
_CPU_BYTES = 256 << 20
_ACCELERATOR_BYTES = 512 << 20


class LossChunks(NamedTuple):
    """How the loss is computed for a part of the tokens at a time.

    Args:
        tokens: number of tokens of a chunk.
        at_once: number of tokens up to which a micro-batch is computed from all its logits.
    """

    tokens: int
    at_once: int

    def divides(self, num_tokens: float) -> bool:
        """Return whether a micro-batch with this number of tokens with loss is computed in
        chunks."""
        return num_tokens > self.at_once


#: Of a run that computes every micro-batch at once.
NO_CHUNKS = LossChunks(0, sys.maxsize)


def choose_loss_chunks(args: TrainArgs, vocabulary: int, device_type: str) -> LossChunks:
    """Return the chunks of the loss. They do not depend on ranks, memory or batch size, so that all
    strategies and numbers of ranks add in the same order."""
    size = args.loss_chunk_size
    if size == 0:
        return NO_CHUNKS
    small = _tokens_of(_CPU_BYTES, vocabulary)
    if device_type == "cpu":
        tokens = small if size == "auto" else size
        return LossChunks(tokens, tokens)
    tokens = _tokens_of(_ACCELERATOR_BYTES, vocabulary) if size == "auto" else size
    # The loss of all logits takes over three times their size.
    return LossChunks(tokens, min(tokens, small))


def _tokens_of(size_bytes: int, vocabulary: int) -> int:
    """Return the number of tokens whose logits in float32 have this size, a multiple of 64."""
    return max(64, size_bytes // (4 * max(vocabulary, 1)) // 64 * 64)

"""Compressors that send every element in fewer bits."""

import torch

from paceline.distributed.communicator import Communicator
from paceline.strategies.reducers.compression.base import Compressor, CompressorState, slot_view


class CastCompressor(Compressor):
    """`bf16`, `fp16`, `int8`: half or a quarter of the bytes. No residual is kept: int8 rounds
    without bias, and the rounding of the others is far below the gradient's noise."""

    stateful = False

    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        flat.copy_(self.all_reduce(flat, state, group, step)[0])


class SignSGD(Compressor):
    """`signsgd`: the ranks vote on the sign of each element, and the majority decides; a tie is
    zero (Bernstein et al., "signSGD with Majority Vote is Communication Efficient And Fault
    Tolerant", 2019, algorithm 1).

    The signs are multiplied by the mean magnitude, added up over the ranks (Karimireddy et al.,
    2019, algorithm 1), so that clipping and learning rates work as for a gradient. One bit cannot
    express zero: for an element that is zero a rank votes plus and minus in turn, by rank and by
    step, so an element that is zero on all ranks does not move on average.
    """

    stateful = False

    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        bucket = state.bucket
        magnitude = flat.abs().sum() / max(1, bucket.numel)
        votes = flat > 0
        if (step + group.rank) % 2 == 0:
            votes |= flat == 0
        message = torch.cat([magnitude.view(1).view(torch.uint8), pack_bits(votes)])
        gathered = message.new_empty((group.size, message.numel()))
        group.wait(group.all_gather(gathered.view(-1), message))
        count = torch.zeros(bucket.size, dtype=torch.int16, device=flat.device)
        size = flat.new_zeros(())
        for received in gathered:
            size += received[:4].clone().view(torch.float32)[0]
            count += unpack_bits(received[4:], bucket.size)
        signs = count.mul_(2).sub_(group.size).sign_()
        flat.zero_()
        for slot in bucket.slots:  # the padding between parameters stays zero
            slot_view(slot, flat).copy_(slot_view(slot, signs)).mul_(size)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return bools [n] as bytes [⌈n / 8⌉], the first of eight in the lowest bit."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    packed = torch.zeros(len(padded), dtype=torch.uint8, device=bits.device)
    for place in range(8):
        packed |= padded[:, place] << place
    return packed


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` bits, as uint8 of 0 and 1."""
    return torch.stack([(packed >> place) & 1 for place in range(8)], 1).view(-1)[:count]

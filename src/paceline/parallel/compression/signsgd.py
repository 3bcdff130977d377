"""One bit an element: its sign."""

import torch

from paceline.distributed.communicator import Communicator
from paceline.parallel.compression.base import Compressor, CompressorState, slot_view
from paceline.parallel.compression.sizes import BucketShape


class SignSGD(Compressor):
    """`signsgd`: the ranks vote on the sign of each element, and the majority decides; where they
    are even the element is zero (Bernstein et al., "signSGD with Majority Vote is Communication
    Efficient And Fault Tolerant", 2019, algorithm 1).

    The signs are given the size of the mean magnitude, added up over the ranks (Karimireddy et al.,
    2019, algorithm 1), so that clipping and learning rates mean what they mean for a gradient. A
    bit cannot say zero: for an element that is zero a rank votes plus and minus in turn, by rank
    and by step, so an element that is zero everywhere goes nowhere on the whole.
    """

    stateful = False

    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        magnitude = flat.abs().sum() / max(1, bucket.numel)
        votes = flat > 0
        if (step + line.rank) % 2 == 0:
            votes |= flat == 0
        message = torch.cat([magnitude.view(1).view(torch.uint8), pack_bits(votes)])
        gathered = message.new_empty((line.size, message.numel()))
        line.wait(line.all_gather(gathered.view(-1), message))
        count = torch.zeros(bucket.size, dtype=torch.int16, device=flat.device)
        size = flat.new_zeros(())
        for rank in range(line.size):
            size += gathered[rank, :4].clone().view(torch.float32)[0]
            count += unpack_bits(gathered[rank, 4:], bucket.size)
        signs = count.mul_(2).sub_(line.size).sign_()
        flat.zero_()
        for slot in bucket.slots:  # the padding between parameters stays zero
            slot_view(slot, flat).copy_(slot_view(slot, signs)).mul_(size)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Bools [n] as bytes [⌈n / 8⌉], the first of eight in the lowest bit."""
    filled = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    packed = torch.zeros(filled.shape[0], dtype=torch.uint8, device=bits.device)
    for place in range(8):
        packed |= filled[:, place] << place
    return packed


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` bits, as uint8 of 0 and 1."""
    return torch.stack([(packed >> place) & 1 for place in range(8)], 1).view(-1)[:count]

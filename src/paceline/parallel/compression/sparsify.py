"""Few elements are sent: the largest, or some drawn by chance; the others wait in the residual."""

import math

import torch

from paceline.config.schema.compression import Compression
from paceline.distributed.communicator import Communicator
from paceline.parallel.compression.base import Compressor, CompressorState, blocks
from paceline.parallel.compression.local_adam import SECOND
from paceline.parallel.compression.quantize import (
    CODES,
    PLAIN,
    Codec,
    coded_sum,
    pack,
    unpack,
)
from paceline.parallel.compression.sizes import BucketShape, num_chosen, round_up

#: About so many elements are looked at to guess how large the largest are.
_SAMPLE = 1 << 15


class SparseCompressor(Compressor):
    """What `topk` and `randomk` have in common.

    Args:
        momentum: of momentum correction; 0: none. Each rank gathers momentum of its own gradient,
            and what is chosen is chosen from the sum of that; where an element is sent its momentum
            ends, for it is of an old gradient (Lin et al., "Deep Gradient Compression", 2018,
            sections 3.1 and 3.2, algorithm 4).
    """

    def __init__(self, settings: Compression, seed: int, momentum: float = 0.0) -> None:
        super().__init__(settings, seed)
        chain = settings.chain
        self.momentum = momentum
        self.code: Codec = CODES[chain[1]] if len(chain) > 1 else PLAIN

    def state_of(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        state = super().state_of(bucket, device)
        if self.momentum:
            state.flats["momentum"] = torch.zeros(bucket.size, dtype=torch.float32, device=device)
        return state

    def _gather(self, flat: torch.Tensor, state: CompressorState) -> torch.Tensor:
        """Add this step's gradient to what waits; returns that."""
        residual = state.flats["residual"]
        if self.momentum:
            flat = state.flats["momentum"].mul_(self.momentum).add_(flat)
        return residual.add_(flat)

    def _keep(
        self, state: CompressorState, chosen: torch.Tensor, kept: torch.Tensor | None
    ) -> None:
        """``kept``: what of the chosen elements waits on; None: nothing."""
        residual = state.flats["residual"]
        residual[chosen] = residual.new_zeros(()) if kept is None else kept
        if self.momentum:
            state.flats["momentum"][chosen] = 0.0


class TopK(SparseCompressor):
    """`topk`: the elements of a bucket that are largest in magnitude, each with its sign and its
    place. Every rank chooses its own; an all-gather brings them to all, who add them up in order of
    rank.

    Where what waits are Adam's directions d, all of one size at first, they are weighed by the root
    of the gradient's size g: by the geometric mean of the step's size |d| and of the decrease of
    the loss that it promises, |d| g. Found by trial: with either of the two alone training takes
    more steps.
    """

    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        waiting = self._gather(flat, state)
        count = num_chosen(self.settings, bucket, step)
        chosen = largest(self._weight(waiting, state), count)
        values = waiting[chosen]
        codes, scale = self.code.encode(
            _filled(values), self.generator(step, bucket, flat.device, line.rank)
        )
        self._keep(
            state,
            chosen,
            None if self.code is PLAIN else values - self.code.decode(codes, scale)[:count],
        )
        places = chosen.to(torch.int32).view(1, -1).view(torch.uint8)
        message = torch.cat([places, pack(self.code, codes.view(1, -1), scale)], 1)
        gathered = message.new_empty((line.size, message.shape[1]))
        line.wait(line.all_gather(gathered.view(-1), message.view(-1)))
        flat.zero_()
        theirs = unpack(self.code, gathered[:, 4 * count :].contiguous())[:, :count]
        for rank in range(line.size):
            at = gathered[rank, : 4 * count].contiguous().view(torch.int32).long()
            flat.index_add_(0, at, theirs[rank])

    def _weight(self, waiting: torch.Tensor, state: CompressorState) -> torch.Tensor:
        """Magnitudes by which elements are chosen."""
        second = state.flats.get(SECOND)
        if second is None:
            return waiting.abs()
        weighed = torch.empty_like(waiting)
        for out, values, moment in blocks(weighed, waiting, second):
            torch.mul(values, moment.sqrt().sqrt_(), out=out).abs_()
        return weighed


class RandomK(SparseCompressor):
    """`randomk`: elements drawn by chance, the same on every rank, so that their values alone are
    summed. The bucket is cut into as many stretches as elements are sent, and one is drawn of each:
    any element has the same chance."""

    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        waiting = self._gather(flat, state)
        chosen = self.draw(bucket, step).to(flat.device)
        values = waiting[chosen]
        if self.code is PLAIN:
            self._keep(state, chosen, None)
            line.wait(line.all_reduce(values))
        else:
            total, sent = coded_sum(
                values,
                self.code,
                line,
                lambda turn: self.generator(step, bucket, flat.device, line.rank, turn),
            )
            self._keep(state, chosen, values - sent)
            values = total
        flat.zero_()
        flat[chosen] = values

    def draw(self, bucket: BucketShape, step: int) -> torch.Tensor:
        """Places in the bucket, ascending, int64."""
        count, numel = num_chosen(self.settings, bucket, step), bucket.numel
        edges = torch.arange(count + 1) * numel // count
        width = edges[1:] - edges[:-1]
        chance = torch.rand(
            count, generator=self.generator(step, bucket, torch.device("cpu")), dtype=torch.float64
        )
        found = edges[:-1] + torch.minimum((chance * width).long(), width - 1)
        # Places count the parameters' elements; between parameters a bucket has padding.
        starts = torch.tensor(
            [sum(one.numel for one in bucket.slots[:at]) for at in range(len(bucket.slots))]
        )
        offsets = torch.tensor([one.offset for one in bucket.slots])
        slot = torch.searchsorted(starts, found, right=True) - 1
        return found - starts[slot] + offsets[slot]


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the ``count`` largest elements, none of them negative; ascending, int64 [count].

    On a CPU a sample says how large these are about, and only what is as large is sorted (Lin et
    al., 2018, section 5): the result is that of sorting all, but for elements of one magnitude.
    """
    numel = magnitudes.numel()
    among = None
    if magnitudes.device.type == "cpu" and numel > 4 * _SAMPLE and count * 8 < numel:
        sample = magnitudes[:: numel // _SAMPLE]
        expected = sample.numel() * count / numel
        # four standard deviations: rarely too few
        margin = math.ceil(expected + 4 * math.sqrt(expected) + 4)
        threshold = sample.topk(margin).values[-1]
        found = (~(magnitudes < threshold)).nonzero().view(-1)  # what is not a number is not hidden
        among = found if count <= found.numel() <= numel // 4 else None
    if among is None:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    return among[magnitudes[among].topk(count, sorted=False).indices].sort().values


def _filled(values: torch.Tensor) -> torch.Tensor:
    """With zeros to a multiple of four elements: so messages of any code begin where float32 can be
    read."""
    return torch.nn.functional.pad(values, (0, round_up(values.numel()) - values.numel()))

"""Compressors that send few elements, the largest or randomly drawn ones. The others wait in the
residual."""

import math

import torch

from paceline.distributed.communicator import Communicator
from paceline.parallel.state import MOMENTUM, SECOND_MOMENT
from paceline.strategies.reducers.compression.base import Compressor, CompressorState, blocks
from paceline.strategies.reducers.compression.codecs import FLOAT32
from paceline.strategies.reducers.compression.sizes import BucketShape, num_chosen, round_up

#: Number of elements in the sample that estimates how large the largest elements are.
_SAMPLE_ELEMENTS = 1 << 15


class SparseCompressor(Compressor):
    """What `topk` and `randomk` have in common.

    With momentum correction each rank accumulates momentum of its local gradient, and elements are
    chosen from the sum of that. The momentum of an element ends when it is sent, because it is of
    an old gradient (Lin et al., "Deep Gradient Compression", 2018, sections 3.1 and 3.2, algorithm
    4).
    """

    def initial_state(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        state = super().initial_state(bucket, device)
        if self.momentum:
            state.flats[MOMENTUM] = torch.zeros(bucket.size, device=device)
        return state

    def _accumulate(self, flat: torch.Tensor, state: CompressorState) -> torch.Tensor:
        """Add this step's gradient to the residual, and return that."""
        if self.momentum:
            flat = state.flats[MOMENTUM].mul_(self.momentum).add_(flat)
        return state.flats["residual"].add_(flat)

    def _keep(
        self, state: CompressorState, chosen: torch.Tensor, rest: torch.Tensor | None
    ) -> None:
        """Set the residual of the chosen elements to ``rest``; None: zero."""
        residual = state.flats["residual"]
        residual[chosen] = residual.new_zeros(()) if rest is None else rest
        if self.momentum:
            state.flats[MOMENTUM][chosen] = 0.0


class TopK(SparseCompressor):
    """`topk`: the elements of a bucket with the largest magnitudes, each with its sign and its
    place. Every rank chooses from its residual; an all-gather distributes them to all ranks, which
    add them up in order of rank.

    If the residual has Adam's directions d, all of one size at first, they are weighted by the root
    of the gradient's size g: by the geometric mean of the step's size |d| and of the decrease of
    the loss that it promises, |d| g. Found by trial: with either of the two alone training takes
    more steps.
    """

    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        waiting = self._accumulate(flat, state)
        count = num_chosen(self.settings, state.bucket, step)
        chosen = largest(self._weight(waiting, state), count)
        values = waiting[chosen]
        # Padded to a multiple of four elements, so that float32 can be read behind any format.
        padded = torch.nn.functional.pad(values, (0, round_up(count) - count)).view(1, -1)
        encoded = self.codec.encode(
            padded, self.generator(step, state.bucket, flat.device, group.rank)
        )
        exact = self.codec is FLOAT32
        self._keep(state, chosen, None if exact else values - self.codec.decode(encoded)[0, :count])
        places = chosen.to(torch.int32).view(1, -1).view(torch.uint8)
        message = torch.cat([places, encoded], 1)
        gathered = message.new_empty((group.size, message.shape[1]))
        group.wait(group.all_gather(gathered.view(-1), message.view(-1)))
        flat.zero_()
        received = self.codec.decode(gathered[:, 4 * count :])
        for rank in range(group.size):
            indices = gathered[rank, : 4 * count].contiguous().view(torch.int32).long()
            flat.index_add_(0, indices, received[rank, :count])

    def _weight(self, waiting: torch.Tensor, state: CompressorState) -> torch.Tensor:
        """Return the magnitudes by which elements are chosen."""
        second = state.flats.get(SECOND_MOMENT)
        if second is None:
            return waiting.abs()
        weighted = torch.empty_like(waiting)
        for out, values, moment in blocks(weighted, waiting, second):
            torch.mul(values, moment.sqrt().sqrt_(), out=out).abs_()
        return weighted


class RandomK(SparseCompressor):
    """`randomk`: randomly drawn elements, the same on every rank, so that only their values are
    sent and summed. The bucket is cut into as many stretches as elements are sent, and one is drawn
    from each: all elements have the same chance."""

    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        waiting = self._accumulate(flat, state)
        chosen = self.draw(state.bucket, step).to(flat.device)
        values = waiting[chosen]
        total, sent = self.all_reduce(values, state, group, step)
        self._keep(state, chosen, None if self.codec is FLOAT32 else values - sent)
        flat.zero_()
        flat[chosen] = total

    def draw(self, bucket: BucketShape, step: int) -> torch.Tensor:
        """Return places in the bucket, ascending, int64."""
        count, numel = num_chosen(self.settings, bucket, step), bucket.numel
        edges = torch.arange(count + 1) * numel // count
        width = edges[1:] - edges[:-1]
        uniform = torch.rand(
            count, generator=self.generator(step, bucket, torch.device("cpu")), dtype=torch.float64
        )
        elements = edges[:-1] + torch.minimum((uniform * width).long(), width - 1)
        # `elements` count the parameters' elements; between parameters a bucket has padding.
        starts = torch.tensor(
            [sum(slot.numel for slot in bucket.slots[:end]) for end in range(len(bucket.slots))]
        )
        offsets = torch.tensor([slot.offset for slot in bucket.slots])
        slot = torch.searchsorted(starts, elements, right=True) - 1
        return elements - starts[slot] + offsets[slot]


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the ``count`` largest non-negative elements; ascending, int64 [count].

    On a CPU a sample estimates how large these are, and only elements of at least that size are
    sorted (Lin et al., 2018, section 5). The result is the same as from sorting all, except among
    elements of equal magnitude.
    """
    numel = magnitudes.numel()
    candidates = None
    if magnitudes.device.type == "cpu" and numel > 4 * _SAMPLE_ELEMENTS and count * 8 < numel:
        sample = magnitudes[:: numel // _SAMPLE_ELEMENTS]
        expected = sample.numel() * count / numel
        # With a margin of four standard deviations there are rarely too few candidates.
        margin = math.ceil(expected + 4 * math.sqrt(expected) + 4)
        threshold = sample.topk(margin).values[-1]
        candidates = (~(magnitudes < threshold)).nonzero().view(-1)  # includes NaN
    if candidates is None or not count <= candidates.numel() <= numel // 4:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices].sort().values

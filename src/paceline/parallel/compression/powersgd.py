"""Matrices of low rank stand for the gradient's matrices."""

import torch

from paceline.config.schema.compression import Compression
from paceline.distributed.communicator import Communicator
from paceline.distributed.seeds import derive_seed
from paceline.parallel.compression.base import Compressor, CompressorState, slot_view
from paceline.parallel.compression.quantize import CODES, Codec, coded_sum
from paceline.parallel.compression.sizes import BucketShape, TensorSlot, matrices_of


class PowerSGD(Compressor):
    """`powersgd`: one step of power iteration a step, from the last step's result (Vogels,
    Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, algorithms 1 and 2).

    A gradient M [n × m] becomes P Qᵀ with P [n × r] and Q [m × r]: P = M Q, summed over the ranks
    and made orthonormal; Q = Mᵀ P, summed. Both are linear in M, so sums of small matrices stand
    for the sum of the large ones. What a rank has sent is P (Mᵀ P)ᵀ with its own M; the rest waits
    in its residual. A tensor of more dimensions counts as a matrix of its first one. Vectors, and
    matrices that would not become smaller, go along uncompressed in the first sum.

    Two collectives a bucket, always in this order: so it works on any backend.
    """

    def __init__(self, settings: Compression, seed: int) -> None:
        super().__init__(settings, seed)
        chain = settings.chain
        self.code: Codec | None = CODES[chain[1]] if len(chain) > 1 else None

    def state_of(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        state = super().state_of(bucket, device)
        for slot, (_, columns, rank) in matrices_of(bucket, self.settings.rank):
            state.tensors[(slot.name, "q")] = torch.zeros(columns, rank, device=device)
        return state

    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        waiting = state.flats["residual"].add_(flat)
        matrices = matrices_of(bucket, self.settings.rank)
        compressed = {slot.name for slot, _ in matrices}
        vectors = [
            slot_view(one, waiting).reshape(-1)
            for one in bucket.slots
            if one.name not in compressed
        ]
        given = [
            slot_view(slot, waiting).view(rows, columns) for slot, (rows, columns, _) in matrices
        ]
        starts = [self._start(slot, state.tensors[(slot.name, "q")], step) for slot, _ in matrices]
        # P of all matrices, and the vectors: the first sum
        firsts = [one @ q for one, q in zip(given, starts, strict=True)]
        (*bases, plain), (*_, plain_sent) = self._sum(
            [*firsts, _flat(vectors, waiting)], line, step, bucket, 1
        )
        bases = [orthonormal(one) for one in bases]
        # Q of all matrices: the second
        seconds = [one.t() @ base for one, base in zip(given, bases, strict=True)]
        results, shares = self._sum(seconds, line, step, bucket, 2) if seconds else ([], [])
        flat.zero_()
        for (slot, (rows, columns, _)), base, result, share in zip(
            matrices, bases, results, shares, strict=True
        ):
            torch.mm(base, result.t(), out=slot_view(slot, flat).view(rows, columns))
            slot_view(slot, waiting).view(rows, columns).addmm_(base, share.t(), alpha=-1)
            state.tensors[(slot.name, "q")].copy_(result)
        begin = 0
        for slot in bucket.slots:
            if slot.name not in compressed:
                part = slice(begin, begin + slot.numel)
                slot_view(slot, flat).copy_(plain[part].view(slot.shape))
                slot_view(slot, waiting).sub_(plain_sent[part].view(slot.shape))
                begin += slot.numel

    def _start(self, slot: TensorSlot, last: torch.Tensor, step: int) -> torch.Tensor:
        """The last step's Q (warm start); by chance where there is none, the same on every rank. A
        column that is zero would stay so: it begins anew."""
        empty = last.norm(dim=0, keepdim=True) == 0
        if not bool(empty.any()):
            return last
        chance = torch.Generator("cpu")
        chance.manual_seed(derive_seed(self.seed, f"powersgd/{slot.name}", step))
        fresh = torch.randn(last.shape, generator=chance).to(last.device)
        return torch.where(empty, fresh, last)

    def _sum(
        self,
        tensors: list[torch.Tensor],
        line: Communicator,
        step: int,
        bucket: BucketShape,
        turn: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(sums over the ranks, this rank's shares of them): all tensors in one message."""
        mine = _flat(tensors, tensors[0])
        if self.code is None:
            total = mine.clone()
            line.wait(line.all_reduce(total))
            sent = mine
        else:
            total, sent = coded_sum(
                mine,
                self.code,
                line,
                lambda half: self.generator(step, bucket, mine.device, line.rank, turn, half),
            )
        sizes = [one.numel() for one in tensors]

        def cut(whole: torch.Tensor) -> list[torch.Tensor]:
            return [
                part.view(one.shape) for part, one in zip(whole.split(sizes), tensors, strict=True)
            ]

        return cut(total), cut(sent)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns [n × r] made orthonormal, one after another (Gram-Schmidt; twice, for rounding). A
    column that is a sum of those before it becomes zero: it adds nothing."""
    columns = matrix.t().contiguous()
    done = torch.zeros_like(columns)
    floor = 8 * torch.finfo(matrix.dtype).eps * torch.linalg.vector_norm(columns, dim=1)
    for number, column in enumerate(columns):
        before = done[:number]
        for _ in range(2 if number else 0):
            column = column - (before @ column) @ before
        norm = torch.linalg.vector_norm(column)
        keep = norm > floor[number]
        done[number] = torch.where(
            keep | norm.isnan(), column / torch.where(keep, norm, norm.new_ones(())), 0.0
        )
    return done.t()


def _flat(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in tensors]) if tensors else like.new_zeros(0)

"""Gradient compression by matrices of low rank."""

import torch

from paceline.distributed.communicator import Communicator
from paceline.distributed.seeds import derive_seed
from paceline.strategies.reducers.compression.base import Compressor, CompressorState, slot_view
from paceline.strategies.reducers.compression.sizes import BucketShape, TensorSlot, matrices_of


class PowerSGD(Compressor):
    """`powersgd`: one power iteration per step, starting from the last step's result (Vogels,
    Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, algorithms 1 and 2).

    A gradient M [n × m] becomes P Qᵀ with P [n × r] and Q [m × r]: P = M Q, summed over the ranks
    and orthonormalized; Q = Mᵀ P, summed. Both are linear in M, so sums of small matrices replace
    the sum of the large ones. A rank sends P (Mᵀ P)ᵀ with its local M; the rest waits in its
    residual. A tensor of more dimensions counts as a matrix with its first dimension as rows.
    Vectors, and matrices that would not become smaller, are sent uncompressed in the first sum.

    Two collectives per bucket, always in this order, so it works on any backend.
    """

    def initial_state(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        state = super().initial_state(bucket, device)
        for slot, (_, columns, rank) in matrices_of(bucket, self.settings.rank):
            state.tensors[(slot.name, "q")] = torch.zeros(columns, rank, device=device)
        return state

    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        waiting = state.flats["residual"].add_(flat)
        matrices = matrices_of(state.bucket, self.settings.rank)
        compressed = {slot.name for slot, _ in matrices}
        vectors = [
            slot_view(slot, waiting).reshape(-1)
            for slot in state.bucket.slots
            if slot.name not in compressed
        ]
        gradients = [
            slot_view(slot, waiting).view(rows, columns) for slot, (rows, columns, _) in matrices
        ]
        starts = [self._start(slot, state.tensors[(slot.name, "q")], step) for slot, _ in matrices]
        # The first sum: P of all matrices, and the vectors.
        firsts = [gradient @ q for gradient, q in zip(gradients, starts, strict=True)]
        plain = torch.cat([waiting.new_zeros(0), *vectors])
        (*bases, plain), (*_, plain_sent) = self._sum([*firsts, plain], state, group, step, 1)
        bases = [orthonormal(base) for base in bases]
        # The second sum: Q of all matrices.
        seconds = [gradient.t() @ base for gradient, base in zip(gradients, bases, strict=True)]
        results, shares = self._sum(seconds, state, group, step, 2) if seconds else ([], [])
        flat.zero_()
        for (slot, (rows, columns, _)), base, result, share in zip(
            matrices, bases, results, shares, strict=True
        ):
            torch.mm(base, result.t(), out=slot_view(slot, flat).view(rows, columns))
            slot_view(slot, waiting).view(rows, columns).addmm_(base, share.t(), alpha=-1)
            state.tensors[(slot.name, "q")].copy_(result)
        begin = 0
        for slot in state.bucket.slots:
            if slot.name not in compressed:
                part = slice(begin, begin + slot.numel)
                slot_view(slot, flat).copy_(plain[part].view(slot.shape))
                slot_view(slot, waiting).sub_(plain_sent[part].view(slot.shape))
                begin += slot.numel

    def _start(self, slot: TensorSlot, last: torch.Tensor, step: int) -> torch.Tensor:
        """Return the last step's Q (warm start). Columns that are zero, as before the first step,
        would stay zero: they start from random values, the same on every rank."""
        empty = last.norm(dim=0, keepdim=True) == 0
        if not bool(empty.any()):
            return last
        generator = torch.Generator("cpu")
        generator.manual_seed(derive_seed(self.seed, f"powersgd/{slot.name}", step))
        fresh = torch.randn(last.shape, generator=generator).to(last.device)
        return torch.where(empty, fresh, last)

    def _sum(
        self,
        tensors: list[torch.Tensor],
        state: CompressorState,
        group: Communicator,
        step: int,
        turn: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Sum all tensors over the ranks in one message. Returns (sums, this rank's shares)."""
        sizes = [tensor.numel() for tensor in tensors]
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sums, shares = (
            [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
            for flat in self.all_reduce(message, state, group, step, turn)
        )
        return sums, shares


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormalize columns [n × r] one after another (Gram-Schmidt, twice because of rounding). A
    column that is a linear combination of those before it becomes zero."""
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

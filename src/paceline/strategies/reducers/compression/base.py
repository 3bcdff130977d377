"""The contract of a compressor: sum a bucket of gradients over the ranks and send less than the
bucket. Also the names of compression state in a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paceline.config.schema.compression import Compression
from paceline.distributed.communicator import Communicator
from paceline.distributed.seeds import derive_seed
from paceline.strategies.reducers.compression.codecs import CODECS, FLOAT32
from paceline.strategies.reducers.compression.sizes import BucketShape, TensorSlot, chunk_size

#: Elements of a part of :func:`blocks`: 256 KiB of float32.
_BLOCK_ELEMENTS = 1 << 16


@dataclass
class CompressorState:
    """What a rank keeps of a bucket from step to step.

    Args:
        flats: by kind ("residual", …), float32 tensors of the bucket's size.
        tensors: by (parameter, kind), tensors of other shapes.
    """

    bucket: BucketShape
    flats: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def all_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of both kinds."""
        return [*self.flats.values(), *self.tensors.values()]


def slot_view(slot: TensorSlot, flat: torch.Tensor) -> torch.Tensor:
    """Return the slot's elements of a bucket, as a view in the parameter's shape."""
    return flat[slot.place].view(slot.shape)


def blocks(*flats: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one size into parts that stay in a CPU's cache during several operations."""
    size = _BLOCK_ELEMENTS if flats[0].device.type == "cpu" else max(1, flats[0].numel())
    return zip(*(flat.split(size) for flat in flats), strict=True)


class Compressor(ABC):
    """One method with its settings. What it keeps is in the :class:`CompressorState` of each
    bucket, so that it can go into a checkpoint.

    The sum is the same on every rank, to the bit. What a rank sends and what it keeps add up to
    its gradient: ``residual after = gradient + residual before - sent``, and the result is the sum
    of what the ranks sent. So nothing is lost, only delayed (error feedback: Seide et al., "1-Bit
    Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
    DNNs", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", 2019). Methods without a residual lose the difference.

    Args:
        settings: the config's section.
        seed: seed of the run. Random numbers are a function of (seed, step, bucket, rank).
        momentum: factor of momentum correction, for `topk` and `randomk`; 0: none.
    """

    #: Keeps a residual from step to step.
    stateful = True

    def __init__(self, settings: Compression, seed: int, momentum: float = 0.0) -> None:
        self.settings = settings
        self.seed = seed
        self.momentum = momentum
        self.codec = CODECS.get(settings.chain[-1], FLOAT32)

    def initial_state(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        """Return the state of a bucket before the first step."""
        state = CompressorState(bucket)
        if self.stateful:
            state.flats["residual"] = torch.zeros(bucket.size, device=device)
        return state

    @abstractmethod
    def reduce(
        self, flat: torch.Tensor, state: CompressorState, group: Communicator, step: int
    ) -> None:
        """Replace this rank's gradients by their sum over the ranks of ``group``, in place. A
        collective: every rank issues the same collectives in the same order, whatever the values.

        Args:
            flat: the bucket, float32 [bucket.size].
            step: number of updates made before this one.
        """

    def generator(
        self, step: int, bucket: BucketShape, device: torch.device, *salt: int
    ) -> torch.Generator:
        """Return a source of randomness for this step and bucket; the same on every rank unless
        ``salt`` has the rank."""
        generator = torch.Generator(device)
        generator.manual_seed(derive_seed(self.seed, "compression", step, bucket.number, *salt))
        return generator

    def all_reduce(
        self,
        values: torch.Tensor,
        state: CompressorState,
        group: Communicator,
        step: int,
        *salt: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum float32 values [n] over the ranks, every number sent in the format of ``codec``. A
        collective.

        An all-to-all brings each rank its range of all ranks' values; it adds them up in float32
        in order of rank, and an all-gather distributes the sums. So a rank sends 2(N-1)/N of the
        encoded bytes, as in an all-reduce, and sums never overflow.

        Args:
            salt: tells apart several sums of one bucket and step.

        Returns:
            (total, sent): the sum, the same on every rank, and this rank's share of it: its values
            as they were decoded, and in the range that it added up also the rounding of the sum.
            The shares of all ranks add up to the total.
        """
        if self.codec is FLOAT32:
            total = values.clone()
            group.wait(group.all_reduce(total))
            return total, values
        ranks, numel = group.size, values.numel()
        chunk = chunk_size(numel, ranks)
        padded = values.new_zeros(ranks, chunk)
        padded.view(-1)[:numel] = values
        salt = (group.rank, *salt)
        outbox = self.codec.encode(
            padded, self.generator(step, state.bucket, values.device, *salt, 1)
        )
        inbox = torch.empty_like(outbox)
        dist.all_to_all_single(inbox, outbox, group=group.group)
        received = self.codec.decode(inbox)
        partial = received[0].clone()
        for row in received[1:]:
            partial += row
        message = self.codec.encode(
            partial[None], self.generator(step, state.bucket, values.device, *salt, 2)
        )
        gathered = message.new_empty((ranks, message.shape[1]))
        group.wait(group.all_gather(gathered.view(-1), message.view(-1)))
        total = self.codec.decode(gathered).view(-1)
        sent = self.codec.decode(outbox).view(-1)
        local = slice(group.rank * chunk, (group.rank + 1) * chunk)
        sent[local] += total[local] - partial
        return total[:numel].clone(), sent[:numel]

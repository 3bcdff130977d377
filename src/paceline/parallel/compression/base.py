"""The contract of a compressor: it sums a bucket of gradients over the ranks, sending less than the
bucket."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from paceline.config.schema.compression import Compression
from paceline.distributed.communicator import Communicator
from paceline.distributed.seeds import derive_seed
from paceline.parallel.compression.sizes import BucketShape, TensorSlot

#: Elements of a part of :func:`blocks`: 256 KiB of float32.
_BLOCK = 1 << 16


@dataclass
class CompressorState:
    """What a rank keeps of a bucket from step to step.

    Args:
        flats: by kind ("residual", …), float32 and of the bucket's size.
        tensors: by (parameter, kind), what is of a shape of its own.
    """

    flats: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    @property
    def held(self) -> list[torch.Tensor]:
        return [*self.flats.values(), *self.tensors.values()]


def slot_view(slot: TensorSlot, flat: torch.Tensor) -> torch.Tensor:
    """The slot's elements of a bucket, as a view in the parameter's shape."""
    return flat[slot.place].view(slot.shape)


def blocks(*flats: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one size, cut alike into parts that stay in a CPU's cache while several things are
    done to them."""
    size = _BLOCK if flats[0].device.type == "cpu" else max(1, flats[0].numel())
    return zip(*(one.split(size) for one in flats), strict=True)


class Compressor(ABC):
    """One method, with its settings. What it keeps is in the :class:`CompressorState` of each
    bucket, so it can go into a checkpoint.

    The sum that comes out is the same on every rank, to the bit. What a rank sent and what it keeps
    make up what it was given: ``residual after = gradient + residual before - sent``, and the sum
    is that of what the ranks sent. So nothing is lost, only late (error feedback: Seide et al.,
    "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", 2019). Methods without a residual lose the difference.

    Args:
        settings: the config's section.
        seed: of the run: chance is a function of (seed, step, bucket, rank).
    """

    #: Keeps something from step to step.
    stateful = True

    def __init__(self, settings: Compression, seed: int) -> None:
        self.settings = settings
        self.seed = seed

    def state_of(self, bucket: BucketShape, device: torch.device) -> CompressorState:
        """What is kept of a bucket before the first step."""
        if not self.stateful:
            return CompressorState()
        return CompressorState(
            {"residual": torch.zeros(bucket.size, dtype=torch.float32, device=device)}
        )

    @abstractmethod
    def reduce(
        self,
        flat: torch.Tensor,
        bucket: BucketShape,
        state: CompressorState,
        line: Communicator,
        step: int,
    ) -> None:
        """Put the sum over the ranks of ``line`` in the place of this rank's values, in place. A
        collective; the same number of collectives in the same order on every rank, whatever the
        values are.

        Args:
            flat: [bucket.size], float32.
            step: updates made before this one.
        """

    def generator(
        self, step: int, bucket: BucketShape, device: torch.device, *more: int
    ) -> torch.Generator:
        """A source of chance for this step and bucket; the same on every rank unless ``more`` names
        the rank."""
        made = torch.Generator(device)
        made.manual_seed(derive_seed(self.seed, "compression", step, bucket.number, *more))
        return made

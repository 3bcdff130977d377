"""The interface of what generates completions, and what its implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core.processes import available_memory
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.rollouts.decoding import Completion
from paceline.rollouts.sampling import Sampling
from paceline.train.state import TrainComponents

#: Share of the free memory that gathered weights may take; the rest is for keys and values.
MAX_SHARE = 0.7


@dataclass(frozen=True)
class PromptTokens:
    """A prompt.

    Args:
        number: index in the dataset.
        ids: token ids.
    """

    number: int
    ids: list[int]


@dataclass(frozen=True)
class CompletionLimits:
    """What every engine must know about the completions of a run.

    Args:
        end_ids: token ids that end a completion.
        sampling: how tokens are drawn.
        max_tokens: largest number of tokens of a completion.
        seed: seed of the run.
    """

    end_ids: frozenset[int]
    sampling: Sampling
    max_tokens: int
    seed: int


class CompletionEngine(ABC):
    """Generates the completions of prompts with the model in training."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[PromptTokens], purpose: str, step: int, num_completions: int
    ) -> dict[int, list[Completion]]:
        """Return the completions of this rank's prompts, by the position of the prompt in the
        argument, with the weights that the model has now. A collective.

        Args:
            purpose, step: what the random numbers depend on, besides the prompt.
            num_completions: number of completions of each prompt.
        """

    def close(self) -> None:
        """Release what the engine holds between rollouts."""


def share_of(comm: Communicator, count: int) -> list[int]:
    """Return the positions of this rank's prompts."""
    return [int(number) for number in np.array_split(np.arange(count), comm.size)[comm.rank]]


@contextmanager
def evaluation_mode(components: TrainComponents) -> Iterator[None]:
    """Return a context in which the model computes without gradients, dropout and packed rows."""
    model = components.model
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(uncounted())
        model.eval()
        stack.callback(model.train, was_training)
        stack.enter_context(torch.no_grad())
        stack.enter_context(components.precision.autocast())
        stack.enter_context(attention.without_packing(base_model(model)))
        yield


def count_without_room(comm: Communicator, needed_bytes: int) -> int:
    """Return the number of ranks that do not have the memory to gather weights of this size. A
    collective, unless it is 0."""
    if not needed_bytes:
        return 0
    fits = needed_bytes <= MAX_SHARE * free_bytes(comm)
    (num_without,) = comm.sum(float(not fits))
    return int(num_without)


def free_bytes(comm: Communicator) -> float:
    """Return the free memory of this rank's device; of host memory, its share."""
    if comm.device.type == "cuda":
        return float(torch.cuda.mem_get_info(comm.device)[0])
    return available_memory() / comm.env.local_world_size

"""The tokens of each expert, and the auxiliary loss that balances them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.report import ExpertReport, ExpertStep
from paceline.distributed.communicator import Communicator
from paceline.distributed.host_copies import HostCopy, tensor_of
from paceline.distributed.traffic import uncounted
from paceline.models.experts.counts import ExpertCounter
from paceline.train.callbacks.base import Callback
from paceline.train.state import StepResult, TrainState

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.parallel.strategy import Strategy


@dataclass(frozen=True)
class PendingExperts:
    """The figures of the experts in some steps, whose copy to the host was started.

    Args:
        figures: the largest share of an expert, and the mean auxiliary loss; NaN if unknown.
    """

    figures: HostCopy

    def read(self) -> ExpertStep | None:
        """Return the figures; None if the experts got no tokens."""
        max_over_mean, aux_loss = self.figures.read().tolist()
        if math.isnan(max_over_mean):
            return None
        return {
            "max_over_mean": max_over_mean,
            "aux_loss": None if math.isnan(aux_loss) else aux_loss,
        }


class ExpertRecorder(Callback):
    """Adds up the tokens of each expert over the steps that updated the weights. They are summed
    over the ranks for a logged step, a checkpoint and the report.

    Args:
        world: all ranks.
        is_balanced: whether the auxiliary loss is trained.
    """

    def __init__(
        self, counter: ExpertCounter, strategy: Strategy, world: Communicator, is_balanced: bool
    ) -> None:
        self.counter, self.strategy, self.world = counter, strategy, world
        self.is_balanced = is_balanced
        # Ranks of a tensor group compute the same tokens.
        self._is_counted = world.coordinates["tensor"] == 0
        self._window = torch.zeros_like(counter.tokens)
        self._of_rank = torch.zeros_like(counter.tokens)
        self._unmasked = torch.zeros_like(counter.unmasked)
        self._aux = torch.zeros(2, device=counter.tokens.device)
        sizes = [float(layer.num_experts) for layer in counter.layers]
        self._sizes = tensor_of(sizes, world.wide_dtype, world.device)
        # Up to the checkpoint that this attempt resumed from, and up to now: [layers, experts].
        self._earlier = self._total = torch.zeros(counter.tokens.shape, dtype=torch.int64)
        self._earlier_unmasked = self._total_unmasked = 0
        self._first_step = 0

    def on_train_begin(self, info: object, state: TrainState) -> None:
        if not bool(self._earlier.any()):
            self._first_step = state.first_step

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if result.outcome == "updated":
            if self._is_counted:
                self._window += self.counter.tokens
                self._unmasked += self.counter.unmasked
            if self.strategy.has_data:
                # Groups of ranks with global batches of their own have auxiliary losses of their
                # own, whose mean is reported.
                self._aux[0] += self.counter.aux_loss
                self._aux[1] += 1.0 / self.strategy.count_group.size
        self.counter.clear()

    def start(self) -> PendingExperts:
        """Start to sum the figures since the last call over all ranks. A collective."""
        tokens = self._sum(self._window)
        self._of_rank += self._window
        self._window.zero_()
        aux = self._sum(self._aux)
        self._aux.zero_()
        mean = aux[0] / aux[1] if self.is_balanced else torch.full_like(aux[0], math.nan)
        ratio = _max_over_mean(tokens, self._sizes)
        return PendingExperts(HostCopy(torch.stack([ratio, mean.to(ratio.dtype)])))

    def before_checkpoint(self, state: TrainState) -> None:
        self.update_total()

    def update_total(self) -> None:
        """Sum the tokens of all steps so far over all ranks. A collective."""
        self._total = self._earlier + self._sum(self._of_rank + self._window).cpu().round().long()
        unmasked = self._sum(self._unmasked.reshape(1))
        self._total_unmasked = self._earlier_unmasked + round(unmasked.item())

    def report(self, size: int) -> ExpertReport:
        """Return the figures up to the last call of :meth:`update_total`.

        Args:
            size: number of ranks that the experts of a layer are divided among.
        """
        layers = self.counter.layers
        rows = self._total.tolist()
        ratio = float(_max_over_mean(self._total, self._sizes.cpu()))
        figures: ExpertReport = {
            "size": size,
            "layers": [
                {"name": layer.name, "tokens": row[: layer.num_experts]}
                for layer, row in zip(layers, rows, strict=True)
            ],
            "max_over_mean": None if math.isnan(ratio) else ratio,
        }
        if self._first_step:
            figures["from_step"] = self._first_step
        if self._total_unmasked:
            figures["with_padding"] = self._total_unmasked
        return figures

    def state_dict(self) -> Mapping[str, JsonValue]:
        return {
            "tokens": self._total.tolist(),
            "from_step": self._first_step,
            "with_padding": self._total_unmasked,
        }

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        self._window.zero_()
        self._of_rank.zero_()
        self._aux.zero_()
        self._unmasked.zero_()
        self.counter.clear()
        tokens = torch.tensor(state.get("tokens", []), dtype=torch.int64)
        if tokens.shape == self._total.shape:
            self._earlier = self._total = tokens
            self._first_step = int(str(state.get("from_step", 0)))
            unmasked = int(str(state.get("with_padding", 0)))
        else:
            self._earlier = self._total = torch.zeros_like(self._total)
            unmasked = 0
        self._earlier_unmasked = self._total_unmasked = unmasked

    def _sum(self, local: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        if self.world.size == 1:
            return local.clone()
        total = local.to(self.world.wide_dtype)
        if total is local:
            total = local.clone()
        with uncounted():
            self.world.wait(self.world.all_reduce(total))
        return total


def _max_over_mean(tokens: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the largest ratio of an expert's tokens to the mean of its layer; NaN without tokens.

    Args:
        tokens: number of tokens of each expert, [layers, experts].
        sizes: number of experts of each layer, [layers].
    """
    ratios = tokens.amax(1) * sizes / tokens.sum(1)  # NaN for a layer without tokens
    largest = ratios.nan_to_num(nan=0.0).amax()
    return torch.where(largest > 0, largest, torch.nan)

"""`paceline explain local-sgd`: workers that train independently, drift apart and are synchronized
every few steps."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.core.files import human_bytes
from paceline.distributed.call_log import CountedCall
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.traffic import log_calls
from paceline.explain import training
from paceline.explain.rank_topic import RankFrame, RankTopic, numbers_of
from paceline.explain.record import Check, DrawnRow, Tone, cells_of, number_text
from paceline.messages.pages import PageText
from paceline.parallel.strategy import make_strategy

_WEIGHTS = 4
_SYNC_EVERY = 4
_STEPS = 2 * _SYNC_EVERY
_LEARNING_RATE = 0.1
_NAMES = {"local_sgd": "Local SGD", "diloco": "DiLoCo"}
_ABOUT = {
    "local_sgd": (
        PageText(
            "Local SGD (Stich, 2019): each worker makes {steps} steps on its own data without"
            " communication, then the workers replace their weights by the mean.",
            steps=_SYNC_EVERY,
        )
    ),
    "diloco": (
        PageText(
            "DiLoCo (Douillard et al., 2023): each worker makes {steps} steps on its own data."
            " The mean of the changes is a gradient for an outer optimizer with Nesterov"
            " momentum, which moves the common weights.",
            steps=_SYNC_EVERY,
        )
    ),
}
_DRIFT = (
    " Between synchronizations the workers drift apart, because their data differs. They send"
    " weights once in a while instead of gradients in each step."
)


_SYNCED = range(_SYNC_EVERY - 1, _STEPS, _SYNC_EVERY)


class LocalSGDTopic(RankTopic):
    """Train a small model on real ranks; each rank is a worker.

    The figures: ``algorithm, ranks, sync_every``, ``weights`` (of each worker after each step),
    ``drift`` (largest difference between two workers after the local update of each step) and
    ``ddp_bytes`` (that a rank would send with ``ddp``).

    Attributes:
        local, weights: this worker's weights after the local update of each step, and after the
            synchronization if there is one; ``all_local``, ``all_weights``: of all workers.
    """

    def run(self) -> None:
        config = training.make_config(self.options.algorithm)
        config.local_sgd.sync_every = _SYNC_EVERY
        config.local_sgd.workers = self.world.size
        torch.manual_seed(0)
        model = nn.Linear(_WEIGHTS, 1, bias=False)
        strategy = make_strategy(self.options.algorithm, config, self.world)
        strategy.setup(model)
        strategy.setup_optimizer(
            lambda named: torch.optim.SGD([each for _, each in named], lr=_LEARNING_RATE)
        )
        generator = torch.Generator().manual_seed(1 + self.world.rank)
        inputs = torch.randn(8, _WEIGHTS, generator=generator)
        targets = torch.randn(8, 1, generator=generator)
        self.start = numbers_of(model.weight)
        self.local: list[list[float]] = []
        self.weights: list[list[float]] = []
        self.calls: list[list[CountedCall]] = []

        def micro_step(_: int, module: nn.Module) -> torch.Tensor:
            loss: torch.Tensor = (module(inputs) - targets).square().mean() / self.world.size
            return loss

        def apply(optimizer: torch.optim.Optimizer) -> bool:
            optimizer.step()
            self.local.append(numbers_of(model.weight))
            return True

        for _ in range(_STEPS):
            with self.count_traffic(), log_calls() as calls:
                strategy.forward_backward(micro_step, 1)
                strategy.clip_grad_norm(0.0)
                strategy.optimizer_step(apply)
            self.weights.append(numbers_of(model.weight))
            self.calls.append(calls)
        self.all_local, self.all_weights = self.gather(self.local), self.gather(self.weights)
        self.drifts = [_drift(workers) for workers in zip(*self.all_local, strict=True)]
        name = self.options.algorithm
        self.title, self.about = (
            PageText(
                "{name}: {workers:worker}, {steps} steps",
                name=_NAMES[name],
                workers=self.world.size,
                steps=_STEPS,
            ),
            PageText("{about}{more}", about=_ABOUT[name], more=_DRIFT),
        )
        self.actors = [PageText("worker {rank}", rank=rank) for rank in range(self.world.size)]

    def rank_frames(self) -> Iterator[RankFrame]:
        yield RankFrame("All workers start with the same weights.", _rows(self.start), is_key=True)
        for number in range(_STEPS):
            drift = number_text(self.drifts[number])
            yield RankFrame(
                PageText(
                    "Step {number}: each worker updates its own weights; they differ by up to"
                    " {drift}.",
                    number=number + 1,
                    drift=drift,
                ),
                _rows(self.local[number], "new"),
                is_key=number in _SYNCED,
            )
            if number in _SYNCED:
                yield RankFrame(
                    PageText(
                        "Synchronization after step {number}: all workers get the same weights.",
                        number=number + 1,
                    ),
                    _rows(self.weights[number], "done"),
                    self.calls[number],
                    "weights",
                    is_key=True,
                )

    def checks(self) -> list[Check]:
        checks = [
            Check.equal(
                "after a synchronization all workers have the same weights",
                [0.0] * len(_SYNCED),
                [_drift([weights[step] for weights in self.all_weights]) for step in _SYNCED],
            ),
        ]
        if self.options.algorithm == "local_sgd":
            means = [_mean([local[step] for local in self.all_local]) for step in _SYNCED]
            weights = [self.weights[step] for step in _SYNCED]
            differences = [
                abs(mean - weight)
                for both in zip(means, weights, strict=True)
                for mean, weight in zip(*both, strict=True)
            ]
            is_mean = max(differences) < 1e-6
            checks.append(Check("they are the mean of the workers", weights, means, is_mean))
        return checks

    def facts(self) -> dict[str, str]:
        return {
            "Synchronizations": PageText(
                "{count} in {steps} steps", count=len(_SYNCED), steps=_STEPS
            ),
            "Sent per worker": human_bytes(self.counted_bytes),
            "Gradients with ddp, without padding": human_bytes(self._ddp_bytes()),
            "Largest drift": number_text(max(self.drifts)),
        }

    def add_figures(self) -> None:
        self.figures.update(
            sync_every=_SYNC_EVERY,
            weights=self.all_weights,
            drift=self.drifts,
            ddp_bytes=self._ddp_bytes(),
        )

    def _ddp_bytes(self) -> int:
        return _STEPS * all_reduce_bytes(4 * _WEIGHTS, self.world.size)


def _rows(weights: list[float], tone: Tone = "") -> tuple[DrawnRow, ...]:
    return (DrawnRow("weights", cells_of(weights, tone)),)


def _drift(weights: Sequence[list[float]]) -> float:
    """Return the largest difference of a weight between two workers."""
    differences = [max(values) - min(values) for values in zip(*weights, strict=True)]
    return float(max(differences))


def _mean(weights: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*weights, strict=True)]

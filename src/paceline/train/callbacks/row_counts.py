"""Count the rows of a run that streams its data."""

import logging
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from paceline.core.texts import UserText
from paceline.data.counts import StreamCounts
from paceline.data.loader import MicroBatch
from paceline.data.pipeline import DataPipeline
from paceline.distributed.traffic import uncounted
from paceline.parallel.strategy import Strategy
from paceline.train.callbacks.base import Callback
from paceline.train.evaluation import EvalResult
from paceline.train.state import RankContext, StepResult, TrainState

logger = logging.getLogger(__name__)

#: Steps between two ``data`` events.
_INTERVAL_STEPS = 100


class RowCounter(Callback):
    """Adds up the counts that come with the micro-batches, and keeps the sums over all ranks in
    :attr:`DataPipeline.counts`.

    A batch that is skipped or rolled back is not counted, so the counts cover the steps
    whose updates the weights contain.
    """

    def __init__(
        self, ctx: RankContext, strategy: Strategy, data: DataPipeline, source_names: Sequence[str]
    ) -> None:
        self.ctx, self.data, self.source_names = ctx, data, source_names
        self._is_counted = strategy.reports_loss
        # Rank 0 also has the counts up to the checkpoint that the run resumed from.
        self._of_rank = StreamCounts()
        self._of_step = StreamCounts()
        self._total = StreamCounts()
        data.observers.append(self._observe)

    def _observe(self, micro_batches: list[MicroBatch]) -> None:
        self._of_step = StreamCounts()
        for batch in micro_batches:
            if self._is_counted and batch.counts is not None:
                self._of_step.add(batch.counts)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if result.outcome == "updated":
            self._of_rank.add(self._of_step)
        if state.step == state.first_step + 1 or state.step % _INTERVAL_STEPS == 0:
            self._gather(state.step)

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        self._gather(state.step)

    def before_checkpoint(self, state: TrainState) -> None:
        self._gather(state.step)

    def state_dict(self) -> Mapping[str, JsonValue]:
        return self._total.state()

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        counts = StreamCounts()
        if state:
            counts = StreamCounts.from_state(state, self.source_names)
        self._of_rank = counts.copy() if self.ctx.comm.is_rank_zero else StreamCounts()
        self._total = self.data.counts = counts
        self.data.train_dataset.seek(counts.anchors)

    def _gather(self, step: int) -> None:
        """Sum the counts of all ranks and emit a ``data`` event. A collective."""
        with uncounted():
            by_rank = self.ctx.comm.gather_objects(self._of_rank)
        total = StreamCounts()
        for counts in by_rank:
            total.add(counts)
        if total == self._total:
            return
        for reason in total.dropped.keys() - self._total.dropped.keys():
            logger.warning(
                UserText(
                    "step {step}: {dropped:row} of {read} dropped: {reason} (first: {first})",
                    code="streamed-rows-dropped",
                    step=step,
                    dropped=total.dropped[reason],
                    read=f"{total.read:,}",
                    reason=reason,
                    first=total.first.get(reason),
                )
            )
        self._total = self.data.counts = total
        self.ctx.events.emit({"type": "data", "step": step, "data": total.as_dict()})

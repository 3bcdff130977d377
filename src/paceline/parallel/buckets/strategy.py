"""Strategies whose gradients are summed over replicas in buckets, by the backend's all-reduce or by
a reducer."""

from paceline.parallel.buckets.reducer import GradientReducer
from paceline.parallel.comm_profile import StrategyMetrics
from paceline.parallel.state import StateReader, TensorShard
from paceline.parallel.strategy import MemoryKind, OptimizerStep, Strategy


class BucketedStrategy(Strategy):
    """Base class of strategies in which a reducer may sum the gradients, which has state, traffic
    and sections of the report."""

    #: What sums the buckets as the config requires; None: the backend's all-reduce.
    reducer: GradientReducer | None = None

    def begin_accumulation(self) -> None:
        if self.reducer is not None:
            self.reducer.scaler = self.scaler

    @property
    def unscales(self) -> bool:
        return self.reducer is not None and self.reducer.unscales

    @property
    def needs_rollback_on_skip(self) -> bool:
        return self.reducer is not None and self.reducer.needs_rollback_on_skip

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        updated = apply(self.optimizer)
        if self.reducer is not None:
            self.reducer.finish_step(updated)
        return updated

    def extra_state(self) -> list[TensorShard]:
        return [] if self.reducer is None else self.reducer.extra_state()

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        if self.reducer is None:
            return super().load_extra_state(source)
        return self.reducer.load_extra_state(source)

    @property
    def other_memory_kind(self) -> MemoryKind:
        return "parameters" if self.reducer is None else "optimizer"

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        return {} if self.reducer is None else self.reducer.report_metrics(sent_bytes)

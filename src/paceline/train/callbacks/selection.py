"""Select the best evaluation: save its checkpoint, load it at the end, and stop early."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue, TypeAdapter

from paceline.checkpoint.format import name_of
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import load_train_state
from paceline.checkpoint.transfer import open_checkpoint
from paceline.config.derive import ResolvedValues
from paceline.config.metrics.best import best_metric
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError, RunError, did_you_mean
from paceline.core.formatting import counted
from paceline.core.formatting import loss as figure_text
from paceline.core.report import BestModel
from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.train.callbacks.base import Callback, TrainingInfo
from paceline.train.evaluation import EvalResult
from paceline.train.state import TrainComponents, TrainState

logger = logging.getLogger(__name__)


@dataclass
class Selection:
    """What is known of the evaluations so far, and stored in checkpoints.

    Args:
        metric: name of the metric that is compared.
        evaluated_step: step of the latest evaluation.
        best_step, best_value: step and metric of the best evaluation.
        reference: metric that the next evaluation must exceed by ``min_delta`` to count as an
            improvement.
        num_without_improvement: number of evaluations since the last improvement.
    """

    metric: str
    evaluated_step: int | None = None
    best_step: int | None = None
    best_value: float | None = None
    reference: float | None = None
    num_without_improvement: int = 0

    def add(self, step: int, value: float, greater_is_better: bool, min_delta: float) -> None:
        """Add an evaluation. A value that is not finite is never an improvement."""
        self.evaluated_step = step
        sign = 1.0 if greater_is_better else -1.0

        def exceeds(other: float | None, delta: float) -> bool:
            return math.isfinite(value) and (other is None or sign * (value - other) > delta)

        if exceeds(self.best_value, 0.0):
            self.best_step, self.best_value = step, value
        if exceeds(self.reference, min_delta):
            self.reference, self.num_without_improvement = value, 0
        else:
            self.num_without_improvement += 1


_SELECTION = TypeAdapter(Selection)


class ModelSelection(Callback):
    """Compares evaluations by a metric, as ``train_args`` describes it.

    Attributes:
        final_step: step of the weights that the run ends with, once training is complete.
    """

    def __init__(
        self,
        args: TrainArgs,
        derived: ResolvedValues,
        comm: Communicator,
        components: TrainComponents,
        checkpoints: CheckpointManager,
    ) -> None:
        self.args = args
        self.derived = derived
        self.comm = comm
        self.components = components
        self.checkpoints = checkpoints
        self.metric, self.greater_is_better = best_metric(args)
        self.saves_best = args.save_best or args.load_best_model_at_end
        self.final_step: int | None = None
        self._selection = Selection(self.metric)

    def on_train_begin(self, info: TrainingInfo, state: TrainState) -> None:
        # A signal stops a run before the evaluation that is due after the same step.
        is_evaluated = self._selection.evaluated_step == state.step
        if state.step and self.derived.is_eval_step(state.step) and not is_evaluated:
            self.request_evaluation()

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Compare the evaluation with the best one. A collective."""
        selection, early_stopping = self._selection, self.args.early_stopping
        value = self._metric_of(result)
        if selection.evaluated_step != state.step:
            min_delta = early_stopping.min_delta if early_stopping is not None else 0.0
            selection.add(state.step, value, self.greater_is_better, min_delta)
            if selection.best_step == state.step and self.saves_best:
                self.checkpoints.best_steps += (state.step,)
                self.request_save()
            num_bad = selection.num_without_improvement
            if early_stopping is not None and num_bad >= early_stopping.patience:
                if not math.isfinite(value):
                    raise self._diverged(state.step, value)
                self.request_stop(self._stop_reason())
        result.best_step = selection.best_step

    def _metric_of(self, result: EvalResult) -> float:
        """Return the metric as rank 0 computed it, so that all ranks decide alike."""
        metrics = {"loss": result.loss, **result.metrics}
        names, value = self.comm.broadcast_object((list(metrics), metrics.get(self.metric)))
        if value is None:
            raise RunError(
                "`train_args.metric_for_best_model: {metric}`: the evaluation has no such metric",
                code="missing-best-metric",
                allowed=", ".join(names),
                fix=did_you_mean(self.metric, names, "set one of these"),
                metric=self.metric,
            )
        return float(value)

    def _stop_reason(self) -> str:
        selection = self._selection
        number = counted(selection.num_without_improvement, "evaluation")
        reason = f"early stopping: {self.metric} has not improved in {number}"
        if selection.best_value is None:
            return reason
        return f"{reason}; best: {figure_text(selection.best_value)} at step {selection.best_step}"

    def _diverged(self, step: int, value: float) -> RunError:
        """Return the error that ends a run instead of early stopping: its weights are no model."""
        best = self._selection.best_step
        saved = f"; the best evaluation was at step {best}" if best is not None else ""
        return RunError(
            "early stopping: {metric} is {value} at step {step}, so training has diverged{saved}",
            code="early-stopping-diverged",
            fix="lower `train_args.learning_rate` or warm it up for longer, and resume an earlier"
            " checkpoint with `resume: RUN/checkpoints/…`; with `fp16-mixed`, set"
            " `train_args.precision: bf16-mixed`",
            metric=self.metric,
            value=value,
            step=step,
            saved=saved,
        )

    def on_train_end(self, state: TrainState) -> None:
        """Load the weights of the best evaluation. A collective."""
        self.final_step, best_step = state.step, self._selection.best_step
        if not self.args.load_best_model_at_end or best_step in (None, state.step):
            return
        folder = self.checkpoints.folder
        path, problem = folder / name_of(best_step), None
        with rank_zero_phase(self.comm, "checking the checkpoint of the best model", folder):
            if self.comm.is_rank_zero:
                problem = self._find(path)
        problem = self.comm.broadcast_object(problem)
        if problem is not None:
            logger.warning(
                UserText(
                    "`load_best_model_at_end`: the checkpoint of step {best_step}, which is the"
                    " best, cannot be loaded ({problem}); the model has the weights of step {step}",
                    code="best-checkpoint-not-loaded",
                    best_step=best_step,
                    problem=problem,
                    step=state.step,
                )
            )
            return
        strategy = self.components.strategy
        num_notices = len(strategy.notices)
        with open_checkpoint(path, self.checkpoints.side) as opened:
            load_train_state(strategy, opened, self.components.precision.scaler)
        del strategy.notices[num_notices:]  # they are about continuing the training
        self.final_step = best_step
        value = figure_text(self._selection.best_value)
        logger.info(
            UserText(
                "the model has the weights of step {best_step}, the best evaluation ({metric}"
                " {value})",
                code="best-weights-loaded",
                best_step=best_step,
                metric=self.metric,
                value=value,
            )
        )

    def _find(self, path: Path) -> str | None:
        """Return why the checkpoint cannot be loaded, or None. Download it if it is only in
        ``checkpoint_dir``."""
        try:
            if not path.is_dir() and self.checkpoints.store is not None:
                self.checkpoints.store.fetch(path.name, path.parent)
        except ConfigError as error:
            return error.what
        return verify(path)

    def report(self) -> BestModel | None:
        """Return the record of the best evaluation for the report, or None without evaluations."""
        selection = self._selection
        if selection.best_step is None or selection.best_value is None:
            return None
        return {
            "step": selection.best_step,
            "metric": self.metric,
            "value": selection.best_value,
            "is_final": self.final_step == selection.best_step,
        }

    def state_dict(self) -> Mapping[str, JsonValue]:
        return {} if self._selection.evaluated_step is None else asdict(self._selection)

    def load_state_dict(self, state: Mapping[str, JsonValue]) -> None:
        if state and state.get("metric") != self.metric:
            logger.warning(
                UserText(
                    "`train_args.metric_for_best_model` is `{metric}` now; evaluations before this"
                    " step, which were compared by `{metric_before}`, no longer count",
                    code="best-metric-changed",
                    metric=self.metric,
                    metric_before=state.get("metric"),
                )
            )
            state = {}
        self._selection = _SELECTION.validate_python({"metric": self.metric, **state})
        best_step = self._selection.best_step
        self.checkpoints.best_steps = () if best_step is None else (best_step,)

"""Record some steps of a run with torch's profiler."""

import logging
import os
import warnings

from torch.profiler import profile, schedule, supported_activities

from paceline.config.schema.train_args_sections import Profile
from paceline.core.texts import UserText
from paceline.distributed.torch_compat import (
    can_record_memory_history,
    dump_memory_history,
    record_memory_history,
)
from paceline.train.callbacks.base import Callback
from paceline.train.state import RankContext, StepResult, TrainState

logger = logging.getLogger(__name__)

#: Steps that the profiler runs without recording them, because its own start takes time.
_WARM_UP_STEPS = 1


class StepProfiler(Callback):
    """Writes a Chrome trace of the configured steps on each rank, and on CUDA a memory snapshot.

    If the run stops early, the trace contains the steps up to then.
    """

    def __init__(self, settings: Profile, ctx: RankContext) -> None:
        self.settings = settings
        self.ctx = ctx
        self._has_snapshot = ctx.device.type == "cuda" and can_record_memory_history()
        self._profiler: profile | None = None
        self._first_step = self._step = 0
        self._is_done = False

    def on_step_begin(self, state: TrainState) -> None:
        step, settings = state.step + 1, self.settings
        if step > settings.last_step and step == state.first_step + 1:
            logger.warning(
                UserText(
                    "`train_args.profile`: nothing is recorded, because the run continues from"
                    " step {first_step}, and the last step to record is {last_step}",
                    code="nothing-to-profile",
                    first_step=state.first_step,
                    last_step=settings.last_step,
                )
            )
        is_due = settings.start_step - _WARM_UP_STEPS <= step <= settings.last_step
        if is_due and self._profiler is None and not self._is_done:
            self._first_step = max(step, settings.start_step)
            self._start(num_warm_up=self._first_step - step)

    def _start(self, num_warm_up: int) -> None:
        num_steps = self.settings.last_step - self._first_step + 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*warmup")
            steps = schedule(wait=0, warmup=num_warm_up, active=num_steps, repeat=1)
        # Kineto prints the start and the stop of each profile on standard error up to this level.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(
            activities=supported_activities(),
            schedule=steps,
            on_trace_ready=self._write,
            record_shapes=True,
        )
        if self._has_snapshot:
            record_memory_history()
        elif self.ctx.device.type == "cuda":
            logger.info(
                UserText(
                    "`train_args.profile`: this build of torch records no memory snapshot",
                    code="no-memory-snapshot",
                )
            )
        self._profiler.start()
        self.ctx.cleanup.callback(self._stop)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        if self._profiler is None:
            return
        self._step = state.step
        self._profiler.step()
        if state.step >= self.settings.last_step:
            self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._is_done = True
            profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the files of this rank, and emit the ``profile`` event on rank 0."""
        comm, root = self.ctx.comm, self.ctx.run_dir.root
        traces = [f"profile/rank-{rank:03}.json.gz" for rank in range(comm.size)]
        snapshots = [f"profile/rank-{rank:03}-memory.pickle" for rank in range(comm.size)]
        try:
            self.ctx.run_dir.profile.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(root / traces[comm.rank]))
            if self._has_snapshot:
                dump_memory_history(str(root / snapshots[comm.rank]))
        except OSError as error:
            logger.warning(
                UserText(
                    "the profile of rank {rank} was not written: {reason}",
                    code="profile-not-written",
                    rank=comm.rank,
                    reason=error,
                )
            )
            return
        self.ctx.events.emit(
            {
                "type": "profile",
                "first_step": self._first_step,
                "step": self._step,
                "traces": traces,
                "memory_snapshots": snapshots if self._has_snapshot else [],
            }
        )

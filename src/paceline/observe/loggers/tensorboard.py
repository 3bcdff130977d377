"""TensorBoard (``report_to: [tensorboard]``)."""

from collections.abc import Mapping

from paceline.observe.loggers.base import TrackedRun


class TensorBoardTracker:
    """Writes to ``<output_dir>/tensorboard``."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id = ""  # the folder identifies the run
        # After a resume, purge_step hides the values that an earlier attempt wrote for later steps.
        purge_step = None if run.resumed_from is None else run.resumed_from + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time_s)

    def finish(self, has_failed: bool) -> None:
        self._writer.close()

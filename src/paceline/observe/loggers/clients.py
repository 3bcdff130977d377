"""Trackers that experiment-tracking packages implement. Each class imports its package when a run
starts, in the thread of its logger."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from paceline.observe.loggers.base import TrackedRun, flat


class WandbTracker:
    """Weights & Biases. Its environment variables, such as ``WANDB_MODE``, apply."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._teardown = wandb.teardown
        self.id = run.id
        self._run = wandb.init(
            project=run.project_of("WANDB_PROJECT"),
            name=run.name,
            id=run.id,
            config=dict(run.config),
            dir=str(run.folder),
            resume="allow",
            # The console of the run is in events.jsonl.
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run may log earlier steps again, which wandb's own counter does not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log({**scalars, "step": step})

    def finish(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))
        self._teardown()  # ends wandb's own process


class MlflowTracker:
    """MLflow. Its environment variables, such as ``MLFLOW_TRACKING_URI``, apply."""

    #: Limits of MLflow: parameters in a request, and characters of a parameter's value.
    _MAX_PARAMS, _MAX_CHARS = 100, 6000

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if not run.is_new:
            self.id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return
        name = run.project_of("MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        self.id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [
            Param(key, str(value)[: self._MAX_CHARS]) for key, value in flat(run.config).items()
        ]
        for start in range(0, len(params), self._MAX_PARAMS):
            self._client.log_batch(self.id, params=params[start : start + self._MAX_PARAMS])

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        from mlflow.entities import Metric

        time_ms = int(1000 * time_s)
        metrics = [Metric(key, value, time_ms, step) for key, value in scalars.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, has_failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if has_failed else "FINISHED")


class TrackioTracker:
    """Trackio, on this host or in a Space (``train_args.trackio_space_id``)."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Trackio finds the run to resume by its name.
        self.id = run.name if run.is_new else run.id
        self._run: Any = trackio.init(
            project=run.project_of("TRACKIO_PROJECT"),
            name=self.id,
            space_id=run.space_id,
            config=flat(run.config),
            resume="never" if run.is_new else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self, has_failed: bool) -> None:
        self._run.finish()


class SwanlabTracker:
    """SwanLab. Its environment variables, such as ``SWANLAB_MODE``, apply."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        self.id = run.id[:21]  # the length that SwanLab requires
        settings = {"id": self.id, "resume": "allow"}
        parameters = inspect.signature(swanlab.init).parameters
        swanlab.init(
            project=run.project_of("SWANLAB_PROJ_NAME"),
            experiment_name=run.name,
            config=flat(run.config),
            logdir=os.environ.get("SWANLAB_LOG_DIR") or str(run.folder / "swanlog"),
            settings=swanlab.Settings(log_proxy_type="none"),
            **{name: value for name, value in settings.items() if name in parameters},
        )

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self._swanlab.log(dict(scalars), step=step)

    def finish(self, has_failed: bool) -> None:
        if has_failed:
            from swanlab.data.run import SwanLabRunState

            self._swanlab.finish(SwanLabRunState.CRASHED, error="the run failed")
        else:
            self._swanlab.finish()


class CometTracker:
    """Comet. Its environment variables, such as ``COMET_API_KEY`` and ``COMET_START_ONLINE``,
    apply."""

    def __init__(self, run: TrackedRun) -> None:
        import comet_ml

        self.id = run.id
        settings: dict[str, Any] = {
            "name": run.name,
            "auto_output_logging": False,
            "auto_metric_logging": False,
            "auto_param_logging": False,
            "parse_args": False,
            "log_code": False,
            "log_graph": False,
            "log_git_patch": False,
            "display_summary_level": 0,
        }
        self._experiment = comet_ml.start(
            project_name=run.project_of("COMET_PROJECT_NAME"),
            experiment_key=run.id,
            mode="get_or_create" if run.is_new else "get",
            experiment_config=comet_ml.ExperimentConfig(**settings),
        )
        self._experiment.log_parameters(flat(run.config))

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self._experiment.log_metrics(dict(scalars), step=step)

    def finish(self, has_failed: bool) -> None:
        if has_failed:
            self._experiment.log_other("status", "failed")
        self._experiment.end()

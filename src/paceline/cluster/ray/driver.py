"""Train on a Ray cluster through Ray Train: the driver. Its public name is :mod:`paceline.ray`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from packaging.version import Version

from paceline.cluster.ray.record import RayRunRecord
from paceline.cluster.ray.worker import RayWorkerTask, train_worker
from paceline.config.load import Loaded, load_config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_USAGE,
    ConfigError,
    PacelineError,
    RunError,
    StoppedError,
)
from paceline.core.events import Fault
from paceline.core.failures import ExitRecord, ReportedError
from paceline.core.processes import temporary_environment
from paceline.core.report import Report
from paceline.core.texts import UserText

if TYPE_CHECKING:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

MIN_RAY = "2.50"
_STORE_BYTES = 256 << 20
_CONNECT_S = 10.0


def check_ray() -> None:
    """Check that Ray Train can be imported, without importing it.

    Raises:
        ConfigError: Ray is not installed or too old.
    """
    try:
        installed = version("ray")
        version("pyarrow"), version("pandas")
    except PackageNotFoundError as error:
        raise ConfigError(
            "training on Ray requires the package {reason}, which is not installed",
            code="missing-ray",
            fix='install it with `pip install "paceline[ray]"`',
            reason=error.name,
        ) from error
    if Version(installed) < Version(MIN_RAY):
        raise ConfigError(
            "training on Ray requires Ray {min_ray} or newer, but {installed} is installed",
            code="old-ray",
            fix='update it with `pip install -U "paceline[ray]"`',
            min_ray=MIN_RAY,
            installed=installed,
        )


class WorkerResult(TypedDict):
    """The result of a rank."""

    status: str
    exit_code: int
    report: Report | None


class TorchTrainer:
    """Train a Paceline config on the workers of a Ray cluster. It has the interface of
    :class:`ray.train.torch.TorchTrainer`, with a config instead of a training function.

    Args:
        config: path of a config file, or its content as a mapping; None to use only overrides.
        overrides: further keys, as ``{"train_args.max_steps": 100}`` or as ``key=value`` strings.
        scaling_config: number and resources of the workers.
        run_config: with ``failure_config=FailureConfig(max_failures=N)``, how often Ray restarts
            all workers after a failure. Each time the run resumes from its latest checkpoint. Ray
            Train writes its own files to ``storage_path``; Paceline writes to ``output_dir``.
        torch_config: config of the process group. Default: NCCL for GPU workers, otherwise Gloo,
            with `parallel.collective_timeout_s`.
        max_failures: if there is no ``run_config``. Default: `recovery.max_restarts`.
        allow_config_change: resume although the config has changed.

    Raises:
        ConfigError: the config does not load, or Ray is not installed or too old.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, YamlValue] | None,
        *,
        scaling_config: ScalingConfig,
        overrides: Mapping[str, YamlValue] | Sequence[str] = (),
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        max_failures: int | None = None,
        allow_config_change: bool = False,
    ) -> None:
        check_ray()
        self.started_at = time.time()
        if isinstance(config, Mapping):
            loaded = load_config(None, {**config, **_as_mapping(overrides)})
        else:
            loaded = load_config(config, overrides)
        self.loaded = _for_ray(loaded)
        self.scaling_config, self.run_config = scaling_config, run_config
        self.torch_config, self.allow_config_change = torch_config, allow_config_change
        if run_config is not None:
            failure_config = run_config.failure_config
            max_failures = failure_config.max_failures if failure_config else 0
        elif max_failures is None:
            max_failures = loaded.config.recovery.max_restarts
        self.max_failures = max_failures
        self._record: Any = None
        self._stop_signal: int | None = None

    def fit(self) -> Report:
        """Train, and return the report (the content of ``report.json``). Connect to a cluster first
        if there is no connection, as Ray's own trainers do.

        Raises:
            ConfigError: the config or the data is invalid, which Ray does not retry.
            StoppedError: :meth:`request_stop` stopped the run; a checkpoint was written.
            RunError: the run failed after `max_failures` restarts.
        """
        result = self.results()[0]
        if result["exit_code"] != EXIT_DONE:
            text = "a signal stopped the run before training began"
            if result["report"]:
                text = "a signal stopped the run; a checkpoint is in"
                text += f" {self.loaded.config.output_dir}"
            raise StoppedError(text, result["exit_code"], code="stopped")
        assert result["report"] is not None
        return result["report"]

    def results(self) -> list[WorkerResult]:
        """Like :meth:`fit`, but return the result of every rank, even if the run was stopped."""
        import ray

        if not ray.is_initialized():
            ray.init()
        directory = _directory(ray, self.loaded)
        context = ray.get_runtime_context()
        record_class = ray.remote(num_cpus=0, max_concurrency=1)(RayRunRecord)  # type: ignore[call-overload]
        this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            context.get_node_id(), soft=False
        )
        actor = record_class.options(scheduling_strategy=this_node)
        self._record = actor.remote(context.get_node_id(), self.max_failures)
        if self._stop_signal is not None:
            self._record.request_stop.remote(self._stop_signal)
        from paceline.version import __version__

        output_dir = Path(os.path.abspath(self.loaded.config.output_dir))
        config = self.loaded.config.model_copy(update={"output_dir": str(output_dir)})
        task = RayWorkerTask(
            replace(self.loaded, config=config),
            directory,
            __version__,
            self.allow_config_change,
            self.started_at,
            self._record,
        )
        try:
            error = self._fit(task)
            return _results(ray, self._record, error, self.max_failures)
        finally:
            ray.kill(self._record)
            self._record = None

    def _fit(self, task: RayWorkerTask) -> Exception | None:
        """Run Ray's trainer, and return the exception that it raised, if any."""
        from ray.train import FailureConfig, RunConfig
        from ray.train.torch import TorchConfig
        from ray.train.torch import TorchTrainer as RayTorchTrainer

        def train_loop() -> ExitRecord:
            return train_worker(task)

        with _temporary_storage(self.run_config) as storage:
            run_config = self.run_config or RunConfig(
                name="run",
                storage_path=storage,
                failure_config=FailureConfig(max_failures=self.max_failures),
                **_quiet(),
            )
            run_config = replace(
                run_config, callbacks=[*(run_config.callbacks or []), _callback(self._record)]
            )
            trainer = RayTorchTrainer(
                train_loop,  # type: ignore[arg-type]
                scaling_config=self.scaling_config,
                run_config=run_config,
                torch_config=self.torch_config
                or TorchConfig(timeout_s=int(self.loaded.config.parallel.collective_timeout_s)),
            )
            # Relative paths in the config refer to the driver's directory; and Ray must not print
            # the output of the workers a second time.
            quiet = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
            with temporary_environment(quiet):
                try:
                    trainer.fit()
                except Exception as error:
                    return error
        return None

    def request_stop(self, number: int) -> None:
        """Request the ranks to write a checkpoint and stop, as the signal ``number`` does. Any
        thread may call this."""
        self._stop_signal = number
        if self._record is not None:
            self._record.request_stop.remote(number)


def _results(
    ray: Any, record: Any, error: Exception | None, max_failures: int
) -> list[WorkerResult]:
    """Return the result of each rank.

    Raises:
        PacelineError: the run failed.
    """
    failed = ray.get(record.final_failure.remote())
    if failed is not None:
        if failed.exit_code == EXIT_USAGE:
            raise ConfigError.from_record(failed.cause.record(failed.message))
        raise ReportedError(failed.cause.text, failed.exit_code, failed.cause)
    if error is not None:
        raise _failure(error, ray.get(record.last_fault.remote()), max_failures) from error
    ended = ray.get(record.results.remote())
    return [
        {
            "status": ended[rank].status,
            "exit_code": ended[rank].exit_code,
            "report": ended[rank].report,
        }
        for rank in sorted(ended)
    ]


def _failure(error: Exception, fault: Fault | None, max_failures: int) -> PacelineError:
    if fault is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = "; ".join(lines[:3]) or type(error).__name__
        return RunError(
            "Ray did not start the workers: {text}",
            code="workers-not-started",
            fix="check the nodes and their resources with `ray status`",
            text=text,
        )
    attempts = fault["restart"]
    return RunError(
        "{reason}. Ray started the workers {attempts} times (`max_failures`: {max_failures})",
        code="workers-failed",
        fix="run the same command again, which resumes from the latest checkpoint; or raise"
        " `max_failures`",
        reason=fault["reason"],
        attempts=attempts,
        max_failures=max_failures,
    )


def _for_ray(loaded: Loaded) -> Loaded:
    """Return the config without the settings that Ray decides: number of ranks, hosts, and
    rendezvous."""
    parallel = loaded.config.parallel
    defaults = type(parallel)()
    names = ("num_gpus", "nnodes", "node_rank", "rdzv_endpoint")
    changed = [name for name in names if getattr(parallel, name) != getattr(defaults, name)]
    if not changed:
        return loaded
    listing = ", ".join(f"`parallel.{name}`" for name in changed)
    notice = (
        "warning",
        UserText(
            "{keys}: ignored, because Ray decides how many workers run on which nodes",
            code="keys-decided-by-ray",
            keys=listing,
        ),
    )
    loaded = loaded.with_parallel(
        parallel.model_copy(update={name: getattr(defaults, name) for name in changed})
    )
    return replace(loaded, notices=[*loaded.notices, notice])


def _directory(ray: Any, loaded: Loaded) -> str | None:
    """Return the working directory of the workers: the driver's, or None if Ray copies one to the
    nodes."""
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return os.getcwd()
    if "_ray_pkg_" in os.getcwd() and not os.path.isabs(loaded.config.output_dir):
        raise ConfigError(
            "`output_dir: {output_dir}` is relative, but this job runs in a copy of its working"
            " directory, which Ray deletes",
            code="relative-output-dir",
            fix="set `output_dir` to an absolute path on storage that all nodes share",
            output_dir=loaded.config.output_dir,
        )
    return None


def _as_mapping(overrides: Mapping[str, YamlValue] | Sequence[str]) -> Mapping[str, YamlValue]:
    if isinstance(overrides, Mapping):
        return overrides
    return dict(override.removeprefix("--").split("=", 1) for override in overrides)


def _callback(record: Any) -> Any:
    """Return a callback of Ray Train that reports the workers that Ray lost to the record."""
    from ray.exceptions import RayActorError
    from ray.train import UserCallback

    class _LostWorkers(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            lost = [
                rank
                for rank, error in worker_exceptions.items()
                if isinstance(error, RayActorError)
                or type(error).__name__.startswith("WorkerHealthCheck")
            ]
            if lost:
                record.lose_workers.remote(lost)

    return _LostWorkers()


class _ConnectionSettings(TypedDict, total=False):
    """Arguments of ``ray.init``."""

    logging_level: int
    log_to_driver: bool
    runtime_env: dict[str, str]


def _quiet() -> dict[str, Any]:
    """Return settings that hide the log of Ray Train except errors: the ranks and the driver report
    what happens."""
    import ray.train

    kind = getattr(ray.train, "LoggingConfig", None)  # not in older releases
    return {} if kind is None else {"logging_config": kind(log_level="ERROR")}


@contextlib.contextmanager
def _temporary_storage(run_config: RunConfig | None) -> Iterator[str | None]:
    """Create a folder for Ray Train's own files, and delete it after the run."""
    if run_config is not None:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="paceline-ray-train-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- a cluster for the command line
@dataclass(frozen=True)
class Connection:
    """A connection to a cluster. ``address``: None if the cluster was started for this run."""

    address: str | None
    resources: dict[str, float]


@contextlib.contextmanager
def connected(address: str | None, num_cpus: int, working_dir: Path | None) -> Iterator[Connection]:
    """Connect to the cluster at ``address``, at RAY_ADDRESS, or on this machine; if there is none,
    start one here.

    Args:
        num_cpus: minimum for a cluster that is started here.

    Raises:
        ConfigError: nothing answers at ``address``.
    """
    import logging

    import ray

    settings: _ConnectionSettings = {
        "logging_level": logging.WARNING,
        "log_to_driver": True,
    }
    if working_dir is not None:
        settings["runtime_env"] = {"working_dir": str(working_dir)}
    folder = None
    try:
        if address == "local" or not _join(address, settings):
            # Ray creates sockets in the folder, whose paths must be short.
            base = tempfile.gettempdir()
            folder = tempfile.mkdtemp(prefix="pl-ray-", dir=base if len(base) < 20 else "/tmp")
            ray.init(
                address="local",
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _temp_dir=folder,
                **settings,
            )
        yield Connection(
            None if folder else ray.get_runtime_context().gcs_address, dict(ray.cluster_resources())
        )
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _join(address: str | None, settings: _ConnectionSettings) -> bool:
    """Connect to an existing cluster. Return False if there is none and none was requested."""
    import ray

    requested = address or os.environ.get("RAY_ADDRESS")
    try:
        if requested and requested != "auto":
            _check_answers(requested)
        ray.init(address=address or "auto", **settings)
    except (ConnectionError, OSError) as error:
        if not requested:
            return False
        raise ConfigError(
            "no Ray cluster answers at {requested}",
            code="no-ray-cluster",
            fix="check it with `ray status`; start one with `ray start --head`; or remove"
            " `--address` and unset RAY_ADDRESS",
            requested=requested,
        ) from error
    return True


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at ``HOST:PORT``, because Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            "`{address}` is not the address of a Ray cluster",
            code="invalid-ray-address",
            allowed="HOST:PORT, auto, or local",
            address=address,
        )
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()

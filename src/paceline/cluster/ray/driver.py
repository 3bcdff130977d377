"""Training on a Ray cluster through Ray Train: the driver's side. :mod:`paceline.ray` is its public
name."""

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
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from pydantic import JsonValue

from paceline.cluster.ray.record import RunRecord
from paceline.cluster.ray.worker import WorkerTask, train_worker
from paceline.config.load import Loaded, load_config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_USAGE,
    ConfigError,
    Outcome,
    PacelineError,
    ReportedError,
    RunError,
    StoppedError,
)
from paceline.core.events import Fault
from paceline.core.processes import temporary_environment

if TYPE_CHECKING:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

OLDEST_RAY = "2.50"
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
            f"training on Ray needs the package {error.name}, which is not installed",
            fix='install it with `pip install "paceline[ray]"`',
        ) from error
    if Version(installed) < Version(OLDEST_RAY):
        raise ConfigError(
            f"training on Ray needs Ray {OLDEST_RAY} or newer, and {installed} is installed",
            fix='update it with `pip install -U "paceline[ray]"`',
        )


class TorchTrainer:
    """Train a Paceline config on the workers of a Ray cluster. It is used as
    :class:`ray.train.torch.TorchTrainer`, which it runs, with a config in the place of a training
    function.

    Args:
        config: path of a config file, or its content as a mapping; None if the overrides give all.
        overrides: further keys, as ``{"train_args.max_steps": 100}`` or as words of a command line
            (``key=value``).
        scaling_config: how many workers, and what each of them gets.
        run_config: with ``failure_config=FailureConfig(max_failures=N)``, how often Ray starts all
            workers again after a failure. Each time the run resumes from its newest checkpoint.
            Files of Ray Train itself go to its ``storage_path``; Paceline's go to ``output_dir``.
        torch_config: of the process group. Default: NCCL for GPU workers, else Gloo, with
            `parallel.collective_timeout_s`.
        max_failures: without a ``run_config``. Default: `recovery.max_restarts` of the config.
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
        self.scaling_config, self.run_config, self.torch_config = (
            scaling_config,
            run_config,
            torch_config,
        )
        self.allow_config_change = allow_config_change
        self.max_failures = (
            loaded.config.recovery.max_restarts if max_failures is None else max_failures
        )
        if run_config is not None:
            self.max_failures = (
                run_config.failure_config.max_failures if run_config.failure_config else 0
            )
        self._record: Any = None
        self._stop_signal: int | None = None

    def fit(self) -> dict[str, JsonValue]:
        """Train, and return the report (the content of ``report.json``). Without a connection to a
        cluster Ray makes one, as its own trainers do.

        Raises:
            ConfigError: the config or the data is wrong. Ray does not retry that.
            StoppedError: :meth:`request_stop` ended the run; a checkpoint is written.
            RunError: the run failed, and `max_failures` restarts did not help.
        """
        result = self.results()[0]
        if result["exit_code"] != EXIT_DONE:
            where = (
                f"a checkpoint is in {self.loaded.config.output_dir}"
                if result["report"]
                else "before the training began"
            )
            raise StoppedError(f"the run was stopped by a signal; {where}", result["exit_code"])
        return result["report"] or {}

    def results(self) -> list[Outcome]:
        """As :meth:`fit`, but returns ``{status, exit_code, report}`` of every rank, also of a run
        that was stopped."""
        import ray

        if not ray.is_initialized():
            ray.init()
        directory = _directory(ray, self.loaded)
        context = ray.get_runtime_context()
        record_class = ray.remote(num_cpus=0, max_concurrency=1)(RunRecord)  # type: ignore[call-overload]
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            context.get_node_id(), soft=False
        )
        self._record = record_class.options(scheduling_strategy=here).remote(context.get_node_id())
        if self._stop_signal is not None:
            self._record.request_stop.remote(self._stop_signal)
        from paceline.version import __version__

        output_dir = Path(os.path.abspath(self.loaded.config.output_dir))
        config = self.loaded.config.model_copy(update={"output_dir": str(output_dir)})
        task = WorkerTask(
            replace(self.loaded, config=config),
            directory,
            __version__,
            self.allow_config_change,
            self.started_at,
            self._record,
        )
        try:
            error = self._fit(task)
            return _outcomes(ray, self._record, error, self.max_failures)
        finally:
            ray.kill(self._record)
            self._record = None

    def _fit(self, task: WorkerTask) -> Exception | None:
        """Run Ray's trainer. Returns what it raised."""
        from ray.train import FailureConfig, RunConfig
        from ray.train.torch import TorchConfig
        from ray.train.torch import TorchTrainer as RayTorchTrainer

        def train_loop() -> Outcome:
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
            # Relative paths of the config are the driver's; and Ray's own copy of what is printed
            # would come twice.
            quiet = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
            with temporary_environment(quiet):
                try:
                    trainer.fit()
                except Exception as error:
                    return error
        return None

    def request_stop(self, number: int) -> None:
        """Ask the ranks to write a checkpoint and stop, as the signal ``number`` does. May be
        called from any thread."""
        self._stop_signal = number
        if self._record is not None:
            self._record.request_stop.remote(number)


def _outcomes(ray: Any, record: Any, error: Exception | None, max_failures: int) -> list[Outcome]:
    """The result of each rank.

    Raises:
        PacelineError: how the run failed, in a paragraph.
    """
    failed = ray.get(record.final_failure.remote())
    if failed is not None:
        if failed.exit_code == EXIT_USAGE:
            raise ConfigError(failed.text)
        raise ReportedError(f"{failed.place}: {failed.text}", failed.exit_code)
    if error is not None:
        raise _failure(error, ray.get(record.last_fault.remote()), max_failures) from error
    results = ray.get(record.results.remote())
    return [results[rank] for rank in sorted(results)]


def _failure(error: Exception, fault: Fault | None, max_failures: int) -> PacelineError:
    if fault is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = "; ".join(lines[:3]) or type(error).__name__
        return RunError(
            f"Ray did not start the workers: {text}",
            fix="see `ray status` for the nodes and their resources",
        )
    attempts = fault["restart"]
    return RunError(
        f"{fault['reason']}. Ray started the workers {attempts} times, and `max_failures` is"
        f" {max_failures}",
        fix=(
            "give the same command again: the run resumes from its newest checkpoint; or raise"
            " `max_failures`"
        ),
    )


def _for_ray(loaded: Loaded) -> Loaded:
    """The config without what Ray decides: how many ranks there are on which hosts, and where they
    meet."""
    parallel = loaded.config.parallel
    defaults = type(parallel)()
    names = [
        name
        for name in ("num_gpus", "nnodes", "node_rank", "rdzv_endpoint")
        if hasattr(defaults, name)
    ]
    changed = [name for name in names if getattr(parallel, name) != getattr(defaults, name)]
    if not changed:
        return loaded
    listing = ", ".join(f"`parallel.{name}`" for name in changed)
    notice = (
        "warning",
        f"{listing}: not used, because Ray decides how many workers run on which nodes",
    )
    loaded = loaded.with_parallel(
        parallel.model_copy(update={name: getattr(defaults, name) for name in changed})
    )
    return replace(loaded, notices=[*loaded.notices, notice])


def _directory(ray: Any, loaded: Loaded) -> str | None:
    """The working directory of the workers: the driver's, unless Ray copies one to the nodes
    (None)."""
    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return os.getcwd()
    if "_ray_pkg_" in os.getcwd() and not os.path.isabs(loaded.config.output_dir):
        raise ConfigError(
            f"`output_dir: {loaded.config.output_dir}` is relative, and this job runs in a copy of"
            " its working directory that Ray deletes",
            fix="set `output_dir` to an absolute path on storage that all nodes share",
        )
    return None


def _as_mapping(overrides: Mapping[str, YamlValue] | Sequence[str]) -> Mapping[str, YamlValue]:
    if isinstance(overrides, Mapping):
        return overrides
    return dict(word.removeprefix("--").split("=", 1) for word in overrides)


def _callback(record: Any) -> Any:
    """A callback of Ray Train that tells the record which workers Ray has lost."""
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


def _quiet() -> dict[str, Any]:
    """Ray Train's own log below the level of errors is left out: the ranks and the driver report
    what happens."""
    import ray.train

    kind = getattr(ray.train, "LoggingConfig", None)  # not in older releases
    return {} if kind is None else {"logging_config": kind(log_level="ERROR")}


@contextlib.contextmanager
def _temporary_storage(run_config: RunConfig | None) -> Iterator[str | None]:
    """A folder for Ray Train's own files, which nothing needs after the run. Checkpoints are
    Paceline's."""
    if run_config is not None:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="paceline-ray-train-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- a cluster for the command line
# -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Connection:
    """A connection to a cluster. ``address``: None for one that was started for this run."""

    address: str | None
    resources: dict[str, float]


@contextlib.contextmanager
def connected(address: str | None, num_cpus: int, working_dir: Path | None) -> Iterator[Connection]:
    """Connect to a cluster: at ``address``, at RAY_ADDRESS, or the one that runs on this machine;
    else start one here.

    Args:
        num_cpus: of a cluster that is started here, at least.

    Raises:
        ConfigError: nothing answers at ``address``.
    """
    import logging

    import ray

    settings: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": True}
    if working_dir is not None:
        settings["runtime_env"] = {"working_dir": str(working_dir)}
    folder = None
    try:
        if address == "local" or not _join(address, settings):
            # Ray makes sockets in the folder, and the path of a socket is short.
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


def _join(address: str | None, settings: dict[str, Any]) -> bool:
    """Connect to a cluster that exists. False: there is none, and none was requested."""
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
            f"no Ray cluster answers at {requested}",
            fix=(
                "check it with `ray status`; start one with `ray start --head`; or leave"
                " `--address` out and unset RAY_ADDRESS"
            ),
        ) from error
    return True


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at ``HOST:PORT``: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"`{address}` is not the address of a Ray cluster", allowed="HOST:PORT, auto, or local"
        )
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()

"""`paceline ray`: train a config on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.options import (
    Integer,
    InvalidValue,
    OptionParser,
    add_config,
    config_and_overrides,
)
from paceline.config.load import load_config
from paceline.core.errors import EXIT_DONE, ConfigError, StoppedError

if TYPE_CHECKING:
    from paceline.cluster.ray.driver import Connection, TorchTrainer, WorkerResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExistingFolder:
    """An existing folder."""

    allowed: str = "a folder"

    def __call__(self, text: str) -> Path:
        path = Path(text)
        if not path.is_dir():
            raise InvalidValue("is not a folder", fix="set a folder, such as `.`")
        return path


@dataclass(frozen=True)
class RayAddress:
    """The address of a Ray cluster."""

    allowed: str = "HOST:PORT of the head node (`ray start --head` prints it), auto, or local"

    def __call__(self, text: str) -> str:
        if not text or text.startswith("ray://"):
            raise InvalidValue(
                "is not supported: Ray Train does not support the Ray Client",
                allowed=self.allowed,
                fix=(
                    "run the command on a node of the cluster, or submit it: `ray job submit --"
                    " paceline ray …`"
                ),
            )
        return text


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--num-workers", Integer(1), "N", "number of workers, with one rank each; required"
    )
    parser.add_option(
        "--address",
        RayAddress(),
        "HOST:PORT",
        "cluster to use (default: RAY_ADDRESS, the cluster that runs on this machine, or a new"
        " one for this run)",
    )
    parser.add_flag(
        "--use-gpu",
        "use one GPU per worker (default: if `parallel.device` or the cluster has GPUs)",
    )
    parser.add_option(
        "--cpus-per-worker",
        Integer(1),
        "N",
        "CPU cores that Ray reserves per worker; also the threads of a CPU worker",
        default=1,
    )
    parser.add_option(
        "--max-failures",
        Integer(-1, range_text="-1 (unlimited) or more"),
        "N",
        "restarts of all workers after a failure (default: `recovery.max_restarts`)",
    )
    parser.add_option(
        "--working-dir",
        ExistingFolder(),
        "DIR",
        "folder that Ray copies to the nodes, for relative paths of the config (default: the"
        " workers use the current folder, which all nodes must be able to read)",
    )
    parser.add_flag("--allow-config-change", "resume although the config has changed")
    parser.example = "paceline ray CONFIG.yaml --num-workers 4 --address auto"


def run(args: Namespace) -> int:
    """Connect to the cluster, train, and print the report.

    Raises:
        ConfigError: the config, an option or the address is invalid.
        RunError: the run failed.
    """
    from paceline.cluster.ray.driver import check_ray, connected

    config_and_overrides(args)  # report errors in the arguments first
    if args.num_workers is None:
        raise ConfigError(
            "`paceline ray` needs the number of workers",
            code="missing-num-workers",
            fix="add `--num-workers N`; with GPUs, one worker per GPU",
        )
    check_ray()
    load_config(*config_and_overrides(args))  # report errors before a cluster is started
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    needed_cpus = args.num_workers * args.cpus_per_worker
    # Ray prints the workers' output on the driver's standard output, which with --json is only for
    # the report.
    with (
        contextlib.redirect_stdout(sys.stderr),
        connected(args.address, needed_cpus, args.working_dir) as connection,
    ):
        trainer = _trainer(args, connection)
        results = _wait_until_done(trainer)
    result = results[0]
    if args.json:
        print(json.dumps(result["report"], indent=2))
    elif result["exit_code"] == EXIT_DONE:
        print(f"report: {trainer.loaded.config.output_dir}/report.html", file=sys.stderr)
    return int(result["exit_code"])


def _trainer(args: Namespace, connection: Connection) -> TorchTrainer:
    from ray.train import ScalingConfig

    from paceline.cluster.ray.driver import TorchTrainer

    path, overrides = config_and_overrides(args)
    device = load_config(path, overrides).config.parallel.device
    use_gpu = _uses_gpus(args, device, connection)
    resources = {"CPU": args.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    trainer = TorchTrainer(
        path,
        overrides=overrides,
        scaling_config=ScalingConfig(
            num_workers=args.num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        max_failures=args.max_failures,
        allow_config_change=args.allow_config_change,
    )
    cluster = "a new cluster on this machine"
    if connection.address:
        cluster = f"the cluster at {connection.address}"
    device_kind = "GPU" if use_gpu else "CPU"
    logger.info("Ray: %d %s workers on %s", args.num_workers, device_kind, cluster)
    for name, per_worker in resources.items():
        needed, available = per_worker * args.num_workers, connection.resources.get(name, 0.0)
        if needed > available:
            logger.warning(
                f"the workers need {needed} {name}s and the cluster has {available:g}: Ray waits"
                " until nodes join. Press Ctrl-C to stop"
            )
    return trainer


def _uses_gpus(args: Namespace, device: str, connection: Connection) -> bool:
    """Return whether each worker gets a GPU: if `--use-gpu` or the config requires it, or if the
    cluster has enough GPUs."""
    if args.use_gpu and device == "cpu":
        raise ConfigError(
            "`--use-gpu` contradicts `parallel.device: cpu`",
            code="gpu-with-cpu-device",
            fix="remove one of them",
        )
    num_gpus = int(connection.resources.get("GPU", 0))
    if args.use_gpu or device not in ("auto", "cpu"):
        return True
    if device == "cpu" or num_gpus == 0:
        return False
    if num_gpus < args.num_workers:
        raise ConfigError(
            "`--num-workers {num_workers}`: the cluster has only {num_gpus} GPUs",
            code="too-many-workers",
            fix="set `--num-workers {num_gpus}`; train on CPU workers with `parallel.device=cpu`;"
            " or, if the cluster grows on demand, add `--use-gpu`",
            num_workers=args.num_workers,
            num_gpus=num_gpus,
        )
    return True


def _wait_until_done(trainer: TorchTrainer) -> list[WorkerResult]:
    """Run the trainer in a thread, so that this one can handle signals: on the first one the ranks
    write a checkpoint and stop; the second one disconnects from Ray, which ends the workers.

    Raises:
        StoppedError: on a second signal.
    """
    results: list[WorkerResult] = []
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            results.extend(trainer.results())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    received: list[int] = []

    def on_signal(number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if received and number == signal.SIGHUP:
            return  # closing a terminal sends it twice
        received.append(number)
        if len(received) == 2:
            raise StoppedError(
                "a second {name} stopped the run without a checkpoint",
                128 + received[0],
                code="stopped-without-checkpoint",
                name=name,
            )
        if len(received) > 2:
            os._exit(128 + received[0])
        logger.info(
            f"{name}: finishing this step and saving a checkpoint; a second signal stops the run"
            " immediately"
        )
        trainer.request_stop(number)

    before = {
        number: signal.signal(number, on_signal)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]
    return results

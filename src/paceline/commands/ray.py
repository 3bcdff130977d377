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
    InvalidValue,
    OptionParser,
    WholeNumber,
    add_config,
    config_and_overrides,
)
from paceline.config.load import load_config
from paceline.core.errors import EXIT_DONE, ConfigError, Outcome, StoppedError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from paceline.cluster.ray.driver import Connection, TorchTrainer


@dataclass(frozen=True)
class ExistingFolder:
    """A folder that exists."""

    allowed: str = "a folder"

    def __call__(self, text: str) -> Path:
        path = Path(text)
        if not path.is_dir():
            raise InvalidValue("is not a folder", fix="give a folder, such as `.`")
        return path


@dataclass(frozen=True)
class RayAddress:
    """The address of a cluster."""

    allowed: str = "HOST:PORT of the head node (`ray start --head` prints it), auto, or local"

    def __call__(self, text: str) -> str:
        if not text or text.startswith("ray://"):
            raise InvalidValue(
                "is not supported: Ray Train does not run through the Ray Client",
                allowed=self.allowed,
                fix=(
                    "run the command on a node of the cluster, or submit it: `ray job submit --"
                    " paceline ray …`"
                ),
            )
        return text


@dataclass(frozen=True)
class RayOptions:
    """What the command line requests."""

    config: Path | None
    overrides: list[str]
    num_workers: int
    address: str | None
    use_gpu: bool
    cpus_per_worker: int
    max_failures: int | None
    working_dir: Path | None
    allow_config_change: bool


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--num-workers",
        type=WholeNumber(1),
        metavar="N",
        help="workers, one rank each; required",
    )
    parser.add_argument(
        "--address",
        type=RayAddress(),
        metavar="HOST:PORT",
        help=(
            "cluster to use; default: RAY_ADDRESS, the cluster that runs on this machine, or one"
            " that is started for this run and ended with it"
        ),
    )
    parser.add_argument(
        "--use-gpu",
        action="store_true",
        help="one GPU for each worker; default: if `parallel.device` or the cluster has GPUs",
    )
    parser.add_argument(
        "--cpus-per-worker",
        type=WholeNumber(1),
        default=1,
        metavar="N",
        help="CPU cores that Ray reserves for each worker; also the threads of a CPU worker",
    )
    parser.add_argument(
        "--max-failures",
        type=WholeNumber(-1, range_text="-1 (without a limit) or more"),
        metavar="N",
        help=(
            "how often Ray starts all workers again after a failure; default:"
            " `recovery.max_restarts`"
        ),
    )
    parser.add_argument(
        "--working-dir",
        type=ExistingFolder(),
        metavar="DIR",
        help=(
            "folder that Ray copies to the nodes, for relative paths of the config; default: the"
            " workers use this folder, which all nodes must see"
        ),
    )
    parser.add_argument(
        "--allow-config-change", action="store_true", help="resume although the config has changed"
    )
    parser.example = "paceline ray CONFIG.yaml --num-workers 4 --address auto"


def make_options(args: Namespace) -> RayOptions:
    """Raises ConfigError if an option is missing."""
    path, overrides = config_and_overrides(args)
    if args.num_workers is None:
        raise ConfigError(
            "`paceline ray` needs the number of workers",
            fix="add `--num-workers N`: with GPUs, one worker for each of them",
        )
    return RayOptions(
        config=path,
        overrides=overrides,
        num_workers=args.num_workers,
        address=args.address,
        use_gpu=args.use_gpu,
        cpus_per_worker=args.cpus_per_worker,
        max_failures=args.max_failures,
        working_dir=args.working_dir,
        allow_config_change=args.allow_config_change,
    )


def run(args: Namespace) -> int:
    """Connect to the cluster, train, and print the report.

    Raises:
        ConfigError: the config, an option or the address is wrong.
        RunError: the run failed.
    """
    from paceline.cluster.ray.driver import check_ray, connected

    options = make_options(args)
    check_ray()
    load_config(options.config, options.overrides)  # before a cluster is started
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    needed_cpus = options.num_workers * options.cpus_per_worker
    # Ray prints what workers write to standard output to the driver's; with --json that is the
    # report's alone.
    with (
        contextlib.redirect_stdout(sys.stderr),
        connected(options.address, needed_cpus, options.working_dir) as connection,
    ):
        trainer = _trainer(options, connection)
        results = _until_done(trainer)
    result = results[0]
    if args.json:
        print(json.dumps(result["report"], indent=2))
    elif result["exit_code"] == EXIT_DONE:
        print(f"report: {trainer.loaded.config.output_dir}/report.html", file=sys.stderr)
    return int(result["exit_code"])


def _trainer(options: RayOptions, connection: Connection) -> TorchTrainer:
    from ray.train import ScalingConfig

    from paceline.cluster.ray.driver import TorchTrainer

    device = load_config(options.config, options.overrides).config.parallel.device
    use_gpu = _uses_gpus(options, device, connection)
    resources = {"CPU": options.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    trainer = TorchTrainer(
        options.config,
        overrides=options.overrides,
        scaling_config=ScalingConfig(
            num_workers=options.num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        max_failures=options.max_failures,
        allow_config_change=options.allow_config_change,
    )
    where = (
        f"the cluster at {connection.address}"
        if connection.address
        else "a cluster on this machine, started for this run"
    )
    kind = "GPU" if use_gpu else "CPU"
    logger.info(f"Ray: {options.num_workers} {kind} workers on {where}")
    for name, per_worker in resources.items():
        available = connection.resources.get(name, 0.0)
        if per_worker * options.num_workers > available:
            logger.warning(
                f"the workers need {per_worker * options.num_workers} {name}s and the cluster has"
                f" {available:g}: Ray waits until nodes join. Press Ctrl-C to end"
            )
    return trainer


def _uses_gpus(options: RayOptions, device: str, connection: Connection) -> bool:
    """One GPU for each worker: if requested, if the config does, or if the cluster has enough of
    them."""
    if options.use_gpu and device == "cpu":
        raise ConfigError(
            "`--use-gpu` contradicts `parallel.device: cpu`", fix="leave one of them out"
        )
    num_gpus = int(connection.resources.get("GPU", 0))
    if options.use_gpu or device not in ("auto", "cpu"):
        return True
    if device == "cpu" or num_gpus == 0:
        return False
    if num_gpus < options.num_workers:
        raise ConfigError(
            f"`--num-workers {options.num_workers}`: the cluster has {num_gpus} GPUs",
            fix=(
                f"set `--num-workers {num_gpus}`; train on CPU workers with `parallel.device=cpu`;"
                " or, if the cluster grows on demand, add `--use-gpu`"
            ),
        )
    return True


def _until_done(trainer: TorchTrainer) -> list[Outcome]:
    """Run the trainer in a thread, so that this one answers signals: the first one asks the ranks
    to write a checkpoint and stop, a second one disconnects from Ray, which ends the workers.

    Raises:
        StoppedError: by a second signal.
    """
    results: list[Outcome] = []
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
            return  # a terminal that is closed sends it twice
        received.append(number)
        if len(received) == 2:
            raise StoppedError(
                f"a second {name} ended the run at once, without a checkpoint", 128 + received[0]
            )
        if len(received) > 2:
            os._exit(128 + received[0])
        logger.info(
            f"{name}: finishing this step and saving a checkpoint; once more ends the run at once"
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

"""`paceline ray`: train a config on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.ray.driver import Connection, TorchTrainer, check_ray, connected
from paceline.config.load import load_config
from paceline.core.errors import EXIT_DONE, ConfigError, StoppedError, did_you_mean

HELP = """\
usage: paceline ray CONFIG.yaml --num-workers N [key=value …]

Train on N workers of a Ray cluster, through Ray Train (`pip install "paceline[ray]"`, Ray 2.50 or newer).

  --num-workers N       workers, one rank each
  --address HOST:PORT   cluster to use; default: RAY_ADDRESS, the cluster that runs on this machine, or one that is started
                        for this run and ended with it
  --use-gpu             one GPU for each worker; default: if `parallel.device` or the cluster has GPUs
  --cpus-per-worker N   CPU cores that Ray reserves for each worker (default 1); also the threads of a CPU worker
  --max-failures N      how often Ray starts all workers again after a failure; -1: without a limit
                        (default: `recovery.max_restarts`)
  --working-dir DIR     folder that Ray copies to the nodes, for relative paths of the config; default: the workers use this
                        folder, which all nodes must see
  --allow-config-change resume although the config has changed
  --json                print the report alone on standard output
"""

#: The options of the verb: how each is read.
VALUES: dict[str, Callable[[str], Any]] = {
    "num-workers": int, "address": str, "cpus-per-worker": int, "max-failures": int, "working-dir": Path,
}  # fmt: skip
FLAGS = ("json", "debug", "use-gpu", "allow-config-change")


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


def check_ray_options(tokens: list[str]) -> None:
    """Raise ConfigError for a token that looks like a misspelled option."""
    for token in tokens:
        name = token[2:].partition("=")[0].replace("_", "-")
        question = did_you_mean(name, [*VALUES, *FLAGS], form="`--{}`", cutoff=0.8)
        if token.startswith("--") and question:
            raise ConfigError(f"`paceline ray` has no option `--{name}`", fix=question)


def make_options(
    path: Path | None, overrides: list[str], values: dict[str, Any], flags: dict[str, bool]
) -> RayOptions:
    """Check the options of the command line.

    Raises:
        ConfigError: an option is missing, unknown or out of range.
    """
    if "num-workers" not in values:
        raise ConfigError(
            "`paceline ray` needs the number of workers",
            fix="add `--num-workers N`: with GPUs, one worker for each of them",
        )
    for name, least in (("num-workers", 1), ("cpus-per-worker", 1), ("max-failures", -1)):
        if name in values and values[name] < least:
            raise ConfigError(
                f"`--{name} {values[name]}` is out of range", allowed=f"{least} or more"
            )
    address = values.get("address")
    if address == "" or (address or "").startswith("ray://"):
        raise ConfigError(
            f"`--address {address}` is not supported: Ray Train does not run through the Ray Client",
            allowed="HOST:PORT of the head node (`ray start --head` prints it), auto, or local",
            fix="run the command on a node of the cluster, or submit it: `ray job submit -- paceline ray …`",
        )
    working_dir = values.get("working-dir")
    if working_dir is not None and not working_dir.is_dir():
        raise ConfigError(
            f"`--working-dir {working_dir}` is not a folder", fix="give a folder, such as `.`"
        )
    return RayOptions(
        path, overrides, values["num-workers"], address, flags["use-gpu"], values.get("cpus-per-worker", 1),
        values.get("max-failures"), working_dir, flags["allow-config-change"],
    )  # fmt: skip


def train_on_ray(options: RayOptions, as_json: bool) -> int:
    """Connect, train, and print. Returns the exit code.

    Raises:
        ConfigError: the config, an option or the address is wrong.
        RunError: the run failed.
    """
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
    if as_json:
        print(json.dumps(result["report"], indent=2))
    elif result["exit_code"] == EXIT_DONE:
        print(f"report: {trainer.loaded.config.output_dir}/report.html", file=sys.stderr)
    return int(result["exit_code"])


def _trainer(options: RayOptions, connection: Connection) -> TorchTrainer:
    from ray.train import ScalingConfig

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
    _say(f"Ray: {options.num_workers} {kind} workers on {where}")
    for name, per_worker in resources.items():
        available = connection.resources.get(name, 0.0)
        if per_worker * options.num_workers > available:
            _say(
                f"warning: the workers need {per_worker * options.num_workers} {name}s and the cluster has {available:g}: Ray "
                "waits until nodes join. Press Ctrl-C to end"
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
            fix=f"set `--num-workers {num_gpus}`; train on CPU workers with `parallel.device=cpu`; or, if the cluster grows on "
            "demand, add `--use-gpu`",
        )
    return True


def _until_done(trainer: TorchTrainer) -> list[dict[str, Any]]:
    """Run the trainer in a thread, so that this one answers signals: the first one asks the ranks
    to write a checkpoint and stop, a second one disconnects from Ray, which ends the workers.

    Raises:
        StoppedError: by a second signal.
    """
    results: list[dict[str, Any]] = []
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
        _say(f"{name}: finishing this step and saving a checkpoint; once more ends the run at once")
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


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)

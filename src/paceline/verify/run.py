"""``paceline verify``: train a few steps under every mode, and certify that they agree and cost
what they said."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.config.derive import derive
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    RunError,
)
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.log import configure_logging, log_notices
from paceline.core.run_dir import RunDir
from paceline.parallel.registry import OTHER_TRAINING
from paceline.verify.certificate import (
    REFERENCE,
    TrialResult,
    bounds_for,
    combine,
    judge,
    not_run,
)
from paceline.verify.modes import VerifyMode, all_modes, make_mode, split_names, trial_config

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from paceline.distributed.devices import Devices
    from paceline.observe.report.certificate import Certificate, ModeReport
    from paceline.train.run_spec import RunSpec
    from paceline.verify.worker import Trial

#: Ranks on a CPU where nothing says how many.
_CPU_RANKS = 4


@dataclass(frozen=True)
class VerifyOptions:
    """What is verified. ``modes``: see :mod:`paceline.verify.modes`; None for all. ``output``: the
    folder of the certificate."""

    modes: str | None = None
    world_size: int | None = None
    steps: int = 20
    output: Path | None = None


@dataclass(frozen=True)
class VerifyResult:
    """The exit code and the certificate; None where a signal ended it."""

    exit_code: int
    certificate: Certificate | None


def verify(loaded: Loaded, options: VerifyOptions) -> VerifyResult:
    """Make the certificate of a config. Exit code 1: a mode passed a bound, or failed; 2: one that
    was asked for was refused.

    Raises:
        ConfigError: the config, or a mode that was asked for, cannot be run; nothing was started.
        RunError: the reference itself failed.
    """
    from paceline.distributed.devices import with_precision, without_idle_offload
    from paceline.launch.fork_server import start_fork_server
    from paceline.tasks import load_task

    _check(options)
    configure_logging()
    log_notices(logger, loaded.notices)
    config = _calm(loaded.config, options.steps)
    devices = _devices(config, options.world_size)
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    config = config.model_copy(update={"parallel": parallel})
    log_notices(logger, notices)
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    logger.info(f"{precision}; all modes are compared in it")
    if options.modes is None:
        names = all_modes(config, devices.count)
    else:
        names = split_names(options.modes, config, devices.count)
    start_fork_server(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": "zero3"})})
    )
    load_task(config).check()
    modes, refused = _modes(config, devices.count, names, options.modes)
    folder = Path(tempfile.mkdtemp(prefix="paceline-verify-"))
    try:
        base = _base_job(replace(loaded, config=config), devices, folder)
        modes, trials = _trials(modes, config, base, names, options.modes, refused)
        results = _run(trials, options.steps, folder, devices.count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(results, int):
        return VerifyResult(results, None)
    certificate = _certificate(names, config, base, devices, options.steps, modes, results, refused)
    if options.output is not None:
        _write(certificate, options.output)
    late = options.modes is not None and any(mode["ok"] is None for mode in certificate["modes"])
    return VerifyResult(
        EXIT_FAILED if not certificate["ok"] else EXIT_USAGE if late else EXIT_DONE, certificate
    )


def _check(options: VerifyOptions) -> None:
    from paceline.distributed.environment import outer_launcher

    if outer_launcher() is not None:
        raise ConfigError(
            "`paceline verify` starts its own ranks",
            fix="start it without torchrun: `paceline verify CONFIG`",
        )
    if options.output is not None:
        from paceline.launch.resume import check_output_dir

        check_output_dir(options.output)


def _calm(config: Config, steps: int) -> Config:
    """The config as it is verified: so many steps, each one's loss told, no dropout, nothing saved
    or evaluated."""
    args = config.train_args.model_copy(
        update={"max_steps": steps, "logging_steps": 1, "save_steps": 0}
    )
    if config.lora.enable and config.lora.dropout:
        logger.info(
            "dropout off: lora.dropout %g → 0; so are all others in the model", config.lora.dropout
        )
    lora = config.lora.model_copy(update={"dropout": 0.0})
    if config.compression.chain:
        logger.info(
            "compression off: compression.method %s → none; it is another training",
            config.compression.text,
        )
    return config.model_copy(
        update={
            "train_args": args,
            "lora": lora,
            "val_dataset": None,
            "resume": "never",
            "report_to": [],
            "compression": Compression(),
        }
    )


def _devices(config: Config, world_size: int | None) -> Devices:
    from paceline.distributed.devices import accelerators, choose_devices

    if world_size is None and config.parallel.num_gpus == "auto":
        on_cpu = config.parallel.device == "cpu" or not accelerators()[1]
        world_size = _CPU_RANKS if on_cpu else len(accelerators()[1])
    count = config.parallel.num_gpus if world_size is None else world_size
    parallel = config.parallel.model_copy(update={"mode": "ddp", "num_gpus": count})
    if world_size is not None and parallel.device == "auto" and not accelerators()[1]:
        parallel.device = "cpu"  # as with `num_gpus: auto`, and logged
    devices = choose_devices(parallel)
    for level, text in devices.notices:
        if config.parallel.device != "cpu":
            text = text.replace("asked for by `parallel.device: cpu`", "no GPU was found")
        log_notices(logger, [(level, text)])
    if devices.count < 2:
        raise ConfigError(
            "one device leaves nothing to compare",
            allowed="two ranks or more",
            fix="run on the CPU with several ranks: `--world-size 4 parallel.device=cpu`",
        )
    return devices


def _modes(
    config: Config, world_size: int, names: list[str], asked: str | None
) -> tuple[list[VerifyMode], list[ModeReport]]:
    """(the modes to run: the reference, then `ddp`, whose time the others are held against, then
    the rest; the verdicts of those that this config cannot run under).

    Raises:
        ConfigError: a mode that was asked for is not there, or refused.
    """
    modes, refused = [], []
    requested = [word.strip() for word in (asked or "").split(",")]
    for name in dict.fromkeys([REFERENCE, "ddp", *names]):
        mode = make_mode(name, config, world_size)
        try:
            _check_mode(mode, config)
            if name in OTHER_TRAINING and name not in requested:
                raise ConfigError(
                    f"not held against `{REFERENCE}`: it is another training, whose losses and"
                    f" weights are meant to differ; `--modes {name}` shows by how much"
                )
        except ConfigError as error:
            if name == REFERENCE or (name in names and _is_strict(asked)):
                raise
            if name in names:
                refused.append(not_run(name, mode.layout.axes.text(), None, error.paragraph()))
            continue
        modes.append(mode)
    return modes, refused


def _is_strict(asked: str | None) -> bool:
    """Return whether every mode is requested by its name, so that a refused one is an error."""
    words = {word.strip() for word in (asked or "").split(",")}
    return asked is not None and not words & {"all", "hybrid"}


def _check_mode(mode: VerifyMode, config: Config) -> None:
    from paceline.parallel.registry import check_strategy, get_spec
    from paceline.tasks import load_task

    config = config.model_copy(update={"parallel": mode.parallel})
    load_task(config).check()  # a task may refuse a mode
    check_strategy(mode.layout.strategy, config, mode.layout.axes)
    if get_spec(mode.layout.strategy).extra_ranks(config):
        raise ConfigError(
            f"`{mode.name}` is not certified: it has servers beside its ranks, and `paceline"
            " verify` starts ranks alone",
            allowed="modes without servers",
            fix="leave `--modes` out, or name others: `--modes ddp,zero3`",
        )


def _base_job(loaded: Loaded, devices: Devices, folder: Path) -> RunSpec:
    """The spec of `ddp`: its global batch is that of all the others."""
    from paceline.launch.preflight import prepare_run

    config = loaded.config.model_copy(update={"output_dir": str(folder / "run")})
    mode = make_mode("ddp", config, devices.count)
    prepared = prepare_run(
        Loaded(config.model_copy(update={"parallel": mode.parallel}), [], loaded.path),
        started_at=time.time(),
        layout=mode.layout,
        device_type=devices.type,
        devices=devices,
    )
    return cast("RunSpec", prepared.spec)


def _trials(
    modes: list[VerifyMode],
    config: Config,
    base: RunSpec,
    names: list[str],
    asked: str | None,
    refused: list[ModeReport],
) -> tuple[list[VerifyMode], list[Trial]]:
    """Return the modes that this global batch is large enough for, and their trials; the others are
    added to ``refused``."""
    kept: list[VerifyMode] = []
    trials: list[Trial] = []
    for mode in modes:
        try:
            trials.append(_trial(len(trials), mode, config, base))
        except ConfigError as error:
            if _is_strict(asked):
                raise
            if mode.name in names:
                refused.append(not_run(mode.name, mode.layout.axes.text(), None, error.paragraph()))
            continue
        kept.append(mode)
    return kept, trials


def _trial(number: int, mode: VerifyMode, config: Config, base: RunSpec) -> Trial:
    from paceline.verify.worker import Trial

    config = trial_config(mode, config, base.derived.global_batch_size)
    derived = derive(
        config,
        world_size=mode.layout.world_size,
        num_train=base.data.num_train,
        num_eval=0,
        default_learning_rate=base.derived.learning_rate,
        train_tokens=base.data.train_tokens,
        replicas=mode.layout.axes.replicas,
        global_batch_size=base.derived.global_batch_size,
    )
    own = base.config.model_copy(
        update={"parallel": mode.parallel, "train_args": config.train_args}
    )
    return Trial(number, mode.name, replace(base, config=own, derived=derived, layout=mode.layout))


def _run(
    trials: list[Trial], steps: int, folder: Path, num_ranks: int
) -> dict[str, TrialResult] | int:
    """Each mode's figures, by name; or the exit code, where a signal ended it. The ranks run all
    modes one after another; where one fails, they are started again for those that are left."""
    from paceline.launch.local import LocalLauncher
    from paceline.verify.worker import Certification, certify_rank, result_file

    results: dict[str, TrialResult] = {}  # failed trials, then the others
    left = trials
    while left:
        ranks = LocalLauncher(
            Certification(left, steps, len(trials), str(folder)), num_ranks, certify_rank
        )
        ranks.on_stop = "finishing this step"
        outcome = ranks.run()
        if outcome["status"] == "stopped":
            logger.info("stopped; nothing is certified")
            return int(outcome["exit_code"])
        failed = next((trial for trial in left if not _has_ended(trial, folder, num_ranks)), None)
        if failed is None:
            break
        text = outcome["text"].partition(" To go on:")[0]
        if failed.number == 0:
            raise RunError(
                f"the reference `{REFERENCE}`, which the others are held against, did not train:"
                f" {text}"
            )
        logger.warning(f"[{failed.number + 1}/{len(trials)}] {failed.name}: failed: {text}")
        results[failed.name] = {"status": "failed", "reason": text}
        left = left[left.index(failed) + 1 :]
    floor = bounds_for(trials[0].spec.config, trials[0].spec.device_type).floor
    for trial in trials:
        if trial.name not in results:
            files = [result_file(folder, trial.number, rank) for rank in range(num_ranks)]
            results[trial.name] = combine([json.loads(path.read_text()) for path in files], floor)
    reference = results[trials[0].name]
    if reference["status"] == "refused":
        raise ConfigError(reference["reason"])
    return results


def _has_ended(trial: Trial, folder: Path, num_ranks: int) -> bool:
    """Return whether every rank has left its result of the trial."""
    from paceline.verify.worker import result_file

    return all(result_file(folder, trial.number, rank).exists() for rank in range(num_ranks))


def _certificate(
    names: list[str],
    config: Config,
    base: RunSpec,
    devices: Devices,
    steps: int,
    modes: list[VerifyMode],
    trials: dict[str, TrialResult],
    refused: list[ModeReport],
) -> Certificate:
    bounds = bounds_for(config, devices.type)
    reference, ddp = trials[REFERENCE], trials.get("ddp")
    verdicts = {verdict["mode"]: verdict for verdict in refused}
    for mode in modes:
        trial, axes = trials[mode.name], mode.layout.axes.text()
        if trial["status"] == "done":
            against = ddp if ddp is not None and ddp["status"] == "done" else None
            verdicts[mode.name] = judge(mode.name, axes, trial, reference, against, bounds)
        else:
            ok = None if trial["status"] == "refused" else False
            verdicts[mode.name] = not_run(mode.name, axes, ok, trial["reason"])
    listed = [verdicts[name] for name in names]
    args = config.train_args
    return {
        "world_size": devices.count,
        "reference": REFERENCE,
        "ok": all(verdict["ok"] is not False for verdict in listed),
        "modes": listed,
        "steps": steps,
        "device": devices.type,
        "precision": args.precision,
        "optim": args.optim,
        "global_batch_size": base.derived.global_batch_size,
        "bounds": {
            "loss": bounds.loss,
            "weights": bounds.weights,
            "family": bounds.family,
            "cost": bounds.cost,
            "floor": bounds.floor,
        },
        "excluded": reference["excluded"],
        "model": config.model,
        "task": config.task,
        "dataset": [source.path for source in config.sources()],
        "time": time.time(),
    }


def _write(certificate: Certificate, folder: Path) -> None:
    """``verify.json`` and ``verify.html``; where the folder is a finished run's, its report is made
    anew with it."""
    from paceline.observe.report.html import render_certificate, write_reports

    run_dir = RunDir(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(folder / "verify.json", certificate)
        write_atomic(folder / "verify.html", render_certificate(certificate))
        if run_dir.report.is_file():
            write_reports(run_dir, json.loads(run_dir.report.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"the certificate could not be written to {folder}: {error}",
            fix="give another `--output`",
        ) from error
    logger.info(f"written: {folder / 'verify.html'}, {folder / 'verify.json'}")

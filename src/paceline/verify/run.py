"""``paceline verify``: train a few steps under every mode, and certify that they agree and that
their memory and traffic are as predicted."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.config.derive import derive
from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    RunError,
)
from paceline.core.files import write_atomic, write_json_atomic
from paceline.core.formatting import counted
from paceline.core.log import configure_logging, log_notices
from paceline.core.run_dir import RunDir
from paceline.distributed.devices import (
    Devices,
    accelerators,
    choose_devices,
    with_precision,
    without_idle_offload,
)
from paceline.distributed.environment import outer_launcher
from paceline.launch.fork_server import start_fork_server
from paceline.launch.passes.draft import Draft, Host
from paceline.models.context.choice import method_of_run
from paceline.models.head.router_coefficient import check_router_loss
from paceline.observe.report.certificate import BoundsReport, Certificate, ModeCertificate
from paceline.observe.report.html import render_certificate, write_reports
from paceline.parallel.limits.images import check_vision_language
from paceline.parallel.registry import OTHER_TRAINING, check_strategy, get_spec
from paceline.tasks import load_task
from paceline.train.run_spec import RunSpec
from paceline.verify.certificate import (
    REFERENCE,
    TrialResult,
    bounds_for,
    combine,
    evaluate_mode,
    not_run,
)
from paceline.verify.modes import VerifyMode, all_modes, make_mode, split_names, trial_config

if TYPE_CHECKING:
    from paceline.verify.worker import ModeTrial

logger = logging.getLogger(__name__)

#: Default number of ranks on a CPU.
_CPU_RANKS = 4


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify. ``modes``: see :mod:`paceline.verify.modes`; None for all. ``output``: folder
    for the certificate."""

    modes: str | None = None
    world_size: int | None = None
    steps: int = 20
    output: Path | None = None


@dataclass(frozen=True)
class VerifyResult:
    """The exit code, and the certificate (None if a signal stopped the command)."""

    exit_code: int
    certificate: Certificate | None


def verify(loaded: Loaded, options: VerifyOptions) -> VerifyResult:
    """Verify a config. Exit code 1: a mode exceeded a bound or failed; 2: a requested mode is not
    supported.

    Raises:
        ConfigError: the config or a requested mode is invalid; nothing was started.
        RunError: the reference failed.
    """
    _check(options)
    _check_rollouts(loaded.config, options.steps)
    configure_logging()
    log_notices(logger, loaded.notices)
    config = _verification_config(loaded.config, options.steps)
    devices = _devices(config, options.world_size)
    parallel, notices = without_idle_offload(config.parallel, devices.type)
    config = config.model_copy(update={"parallel": parallel})
    log_notices(logger, notices)
    config, precision = with_precision(config, devices.type, devices.names[: devices.count])
    logger.info("%s; all modes are compared in it", precision)
    if options.modes is None:
        names = all_modes(config, devices.count)
    else:
        names = split_names(options.modes, config, devices.count)
    start_fork_server(
        config.model_copy(update={"parallel": config.parallel.model_copy(update={"mode": "zero3"})})
    )
    load_task(config).check()
    modes, refused = _modes(config, devices, names, options.modes)
    folder = Path(tempfile.mkdtemp(prefix="paceline-verify-"))
    try:
        base = _base_spec(replace(loaded, config=config), devices, folder)
        modes, trials = _trials(modes, config, base, names, options.modes, refused)
        results = _run(trials, options.steps, folder, devices.count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(results, int):
        return VerifyResult(results, None)
    certificate = _certificate(names, config, base, devices, options.steps, modes, results, refused)
    if options.output is not None:
        _write(certificate, options.output)
    if not certificate["ok"]:
        return VerifyResult(EXIT_FAILED, certificate)
    if options.modes is not None and any(mode["ok"] is None for mode in certificate["modes"]):
        return VerifyResult(EXIT_USAGE, certificate)
    return VerifyResult(EXIT_DONE, certificate)


def _check(options: VerifyOptions) -> None:
    if outer_launcher() is not None:
        raise ConfigError(
            "`paceline verify` is not supported under torchrun: it starts its own ranks",
            code="verify-under-torchrun",
            fix="run it directly: `paceline verify CONFIG`",
        )
    if options.output is not None:
        from paceline.launch.passes.checkpoint import check_output_dir

        check_output_dir(options.output)


def _check_rollouts(config: Config, steps: int) -> None:
    """Check that all modes train on the same completions.

    Raises:
        ConfigError: each mode would generate its own.
    """
    if config.task not in ROLLOUT_TASKS or config.grpo.replay is not None:
        return
    raise ConfigError(
        "`paceline verify` cannot compare modes that generate completions (`task: {task}`): a"
        " difference in the last digits of the weights can change a token that is drawn, and then"
        " all tokens after it",
        code="verify-with-rollouts",
        fix="record the completions of {steps:step} (`paceline sft … max_steps={steps}"
        " grpo.keep_rollouts={steps}`), and set `grpo.replay: OUTPUT_DIR/rollouts`",
        task=config.task,
        steps=steps,
    )


def _verification_config(config: Config, steps: int) -> Config:
    """Return the config for verification: ``steps`` steps, each with its loss logged, without
    dropout, compression, checkpoints and evaluation."""
    args = config.train_args.model_copy(
        update={"max_steps": steps, "logging_steps": 1, "save_steps": 0}
    )
    if config.lora.enable and config.lora.dropout:
        logger.info(
            "dropout is off: lora.dropout %g → 0, and every other dropout of the model",
            config.lora.dropout,
        )
    lora = config.lora.model_copy(update={"dropout": 0.0})
    if config.compression.chain:
        logger.info(
            "compression is off: compression.method %s → none, because it changes the losses",
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
    if world_size is None and config.parallel.num_gpus == "auto":
        on_cpu = config.parallel.device == "cpu" or not accelerators()[1]
        world_size = _CPU_RANKS if on_cpu else len(accelerators()[1])
    count = config.parallel.num_gpus if world_size is None else world_size
    parallel = config.parallel.model_copy(update={"mode": "ddp", "num_gpus": count})
    if world_size is not None and parallel.device == "auto" and not accelerators()[1]:
        parallel.device = "cpu"  # as with `num_gpus: auto`, and logged
    devices = choose_devices(parallel)
    if parallel.device == config.parallel.device:
        log_notices(logger, devices.notices)
    else:
        logger.info("devices: CPU (no GPU was found), %s", counted(devices.count, "rank"))
    if devices.count < 2:
        raise ConfigError(
            "`paceline verify` cannot compare modes on one device",
            code="verify-on-one-device",
            allowed="2 or more ranks",
            fix="run on the CPU with several ranks: `--world-size 4 parallel.device=cpu`",
        )
    return devices


def _modes(
    config: Config, devices: Devices, names: list[str], requested: str | None
) -> tuple[list[VerifyMode], list[ModeCertificate]]:
    """Return the modes to run (the reference, then `ddp`, which others' times are relative to, then
    the rest), and the reports of modes that this config does not support.

    Raises:
        ConfigError: a requested mode does not exist, or is not supported.
    """
    modes, refused = [], []
    for name in dict.fromkeys([REFERENCE, "ddp", *names]):
        mode = make_mode(name, config, devices.count)
        try:
            _check_mode(mode, config, devices.type)
            if name in OTHER_TRAINING and name not in _split(requested):
                raise ConfigError(
                    "not compared with `{reference}`: its losses and weights differ by design;"
                    " `--modes {name}` shows by how much",
                    code="not-comparable",
                    reference=REFERENCE,
                    name=name,
                )
        except ConfigError as error:
            if name == REFERENCE or (name in names and _is_strict(requested)):
                raise
            if name in names:
                refused.append(not_run(name, mode.layout.axes.text(), None, error.paragraph()))
            continue
        modes.append(mode)
    return modes, refused


def _is_strict(requested: str | None) -> bool:
    """Return whether every mode is requested by name, so that an unsupported one is an error."""
    return requested is not None and not {"all", "hybrid"} & _split(requested)


def _split(requested: str | None) -> set[str]:
    return {name.strip() for name in (requested or "").split(",")}


def _check_mode(mode: VerifyMode, config: Config, device_type: str) -> None:
    config = config.model_copy(update={"parallel": mode.parallel})
    check_vision_language(config, mode.layout.axes)
    check_router_loss(config, mode.layout.axes)
    load_task(config).check()  # a task may not support a mode
    check_strategy(mode.layout.strategy, config, mode.layout.axes)
    if mode.layout.axes.context > 1:
        method_of_run(config, mode.layout.axes, device_type)
    if get_spec(mode.layout.strategy).extra_ranks(config):
        raise ConfigError(
            "`{mode}` is not supported with `paceline verify`: it needs servers, and verify starts"
            " only ranks",
            code="verify-with-servers",
            allowed="modes without servers",
            fix="omit `--modes`, or name other modes: `--modes ddp,zero3`",
            mode=mode.name,
        )


def _base_spec(loaded: Loaded, devices: Devices, folder: Path) -> RunSpec:
    """Return the spec of `ddp`, whose global batch all modes use."""
    from paceline.launch.passes.layout import choose_layout
    from paceline.launch.plan import make_spec, plan

    config = loaded.config.model_copy(update={"output_dir": str(folder / "run")})
    mode = make_mode("ddp", config, devices.count)
    config = config.model_copy(update={"parallel": mode.parallel})
    draft = Draft(
        Loaded(config, [], loaded.path), time.time(), host=Host(devices), layout=mode.layout
    )
    return make_spec(plan(draft, first=choose_layout))


def _trials(
    modes: list[VerifyMode],
    config: Config,
    base: RunSpec,
    names: list[str],
    requested: str | None,
    refused: list[ModeCertificate],
) -> tuple[list[VerifyMode], list[ModeTrial]]:
    """Return the modes that this global batch is large enough for, and their trials. Add the other
    modes to ``refused``."""
    supported: list[VerifyMode] = []
    trials: list[ModeTrial] = []
    for mode in modes:
        try:
            trials.append(_trial(len(trials), mode, config, base))
        except ConfigError as error:
            if _is_strict(requested):
                raise
            if mode.name in names:
                refused.append(not_run(mode.name, mode.layout.axes.text(), None, error.paragraph()))
            continue
        supported.append(mode)
    return supported, trials


def _trial(number: int, mode: VerifyMode, config: Config, base: RunSpec) -> ModeTrial:
    from paceline.verify.worker import ModeTrial

    config = trial_config(mode, config, base.derived.global_batch_size)
    derived = derive(
        config,
        world_size=mode.layout.world_size,
        rows_per_epoch=partial(base.data.rows_per_epoch, base.config),
        num_eval=0,
        default_learning_rate=base.derived.learning_rate,
        tokens_per_row=base.data.tokens_per_row(base.config),
        replicas=mode.layout.axes.replicas,
        global_batch_size=base.derived.global_batch_size,
    )
    config = base.config.model_copy(
        update={"parallel": mode.parallel, "train_args": config.train_args}
    )
    spec = replace(base, config=config, derived=derived, layout=mode.layout)
    return ModeTrial(number, mode.name, spec)


def _run(
    trials: list[ModeTrial], steps: int, folder: Path, num_ranks: int
) -> dict[str, TrialResult] | int:
    """Return each mode's result by name, or the exit code if a signal stopped the ranks. The ranks
    run all modes one after another; if one fails, they are restarted for the remaining modes."""
    from paceline.launch.local import LocalLauncher
    from paceline.verify.worker import Certification, certify_rank, result_file

    files = {
        trial.name: [result_file(folder, trial.number, rank) for rank in range(num_ranks)]
        for trial in trials
    }
    results: dict[str, TrialResult] = {}  # failed trials, then the others
    remaining = trials
    while remaining:
        certification = Certification(remaining, steps, len(trials), str(folder))
        launcher = LocalLauncher(certification, num_ranks, certify_rank)
        launcher.on_stop = "finishing this step"
        ended = launcher.run()
        if ended.status == "stopped":
            logger.info("stopped; nothing is certified")
            return ended.exit_code
        unfinished = [
            trial for trial in remaining if not all(path.exists() for path in files[trial.name])
        ]
        if not unfinished:
            break
        failed, text = unfinished[0], ended.message
        if failed.number == 0:
            raise RunError(
                "the reference `{reference}`, which all modes are compared with, failed: {text}",
                code="reference-failed",
                reference=REFERENCE,
                text=text,
            )
        logger.warning("[%d/%d] %s: failed: %s", failed.number + 1, len(trials), failed.name, text)
        results[failed.name] = {"status": "failed", "reason": text}
        remaining = remaining[remaining.index(failed) + 1 :]
    floor = bounds_for(trials[0].spec.config, trials[0].spec.device_type).floor
    for trial in trials:
        if trial.name not in results:
            ranks = [json.loads(path.read_text()) for path in files[trial.name]]
            results[trial.name] = combine(ranks, floor)
    reference = results[trials[0].name]
    if reference["status"] == "refused":
        raise ConfigError(reference["reason"], code="reference-refused")
    return results


def _certificate(
    names: list[str],
    config: Config,
    base: RunSpec,
    devices: Devices,
    steps: int,
    modes: list[VerifyMode],
    trials: dict[str, TrialResult],
    refused: list[ModeCertificate],
) -> Certificate:
    bounds = bounds_for(config, devices.type)
    reference, ddp = trials[REFERENCE], trials.get("ddp")
    verdicts = {verdict["mode"]: verdict for verdict in refused}
    for mode in modes:
        trial, axes = trials[mode.name], mode.layout.axes.text()
        if trial["status"] == "done":
            done_ddp = ddp if ddp is not None and ddp["status"] == "done" else None
            verdicts[mode.name] = evaluate_mode(mode.name, axes, trial, reference, done_ddp, bounds)
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
        "bounds": cast(BoundsReport, asdict(bounds)),
        "excluded": reference["excluded"],
        "model": config.model,
        "task": config.task,
        "dataset": [source.path for source in config.sources()],
        "time": time.time(),
    }


def _write(certificate: Certificate, folder: Path) -> None:
    """Write ``verify.json`` and ``verify.html``. If the folder belongs to a finished run,
    update its report with the certificate."""
    run_dir = RunDir(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(folder / "verify.json", certificate)
        write_atomic(folder / "verify.html", render_certificate(certificate))
        if run_dir.report.is_file():
            write_reports(run_dir, json.loads(run_dir.report.read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            "the certificate could not be written to {folder}: {reason}",
            code="certificate-not-written",
            fix="set another `--output`",
            folder=folder,
            reason=error,
        ) from error
    logger.info("wrote %s and %s", folder / "verify.html", folder / "verify.json")

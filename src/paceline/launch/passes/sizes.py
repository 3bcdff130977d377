"""Derive batch sizes and steps, and check that the data and the strategy allow them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from paceline.config.derive import ResolvedValues, derive
from paceline.config.diff import OTHER_TRAINING
from paceline.config.metrics.best import check_best_metric
from paceline.config.metrics.evaluation import idle_notice
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.distributed.devices import cpu_cores
from paceline.launch.passes.draft import Draft, known
from paceline.parallel.balance import equal_notice
from paceline.parallel.limits.idle import notices_of_idle_axes
from paceline.parallel.registry import check_steps, notice_of_compression
from paceline.tasks import load_task


def derive_sizes(draft: Draft) -> Draft:
    """Derive batch size, steps, warm-up and learning rate."""
    config, data, layout = draft.config, known(draft.data), known(draft.layout)
    derived = derive(
        config,
        world_size=layout.world_size,
        rows_per_epoch=partial(data.rows_per_epoch, config),
        num_eval=data.num_eval,
        default_learning_rate=load_task(config).default_learning_rate,
        tokens_per_row=data.tokens_per_row(config),
        replicas=layout.axes.replicas,
        global_batch_size=draft.global_batch_size,
    )
    return replace(draft, derived=derived)


def find_idle_settings(draft: Draft) -> Iterable[tuple[str, str]]:
    """Return warnings about settings that have no effect or slow the run down."""
    config, layout = draft.config, known(draft.layout)
    idle_evaluation = idle_notice(config)
    if idle_evaluation is not None:
        yield "warning", idle_evaluation
    for name in config.preference.unused(config.task):
        yield (
            "warning",
            UserText(
                "`preference.{name}` has no effect with the loss of `task: {task}`",
                code="preference-without-effect",
                name=name,
                task=config.task,
            ),
        )
    for name in config.grpo.unused(config.task):
        yield (
            "warning",
            UserText(
                "`grpo.{name}` has no effect with `task: {task}`",
                code="grpo-without-effect",
                name=name,
                task=config.task,
            ),
        )
    for notice in notices_of_idle_axes(config.parallel, layout.axes):
        yield "warning", notice
    num_ranks = layout.num_processes
    if draft.host is not None:
        num_ranks = min(known(draft.host).devices.count, num_ranks)
    loaders, cores = config.train_args.dataloader_num_workers, cpu_cores()
    if loaders != "auto" and loaders * num_ranks > cores:
        yield (
            "warning",
            UserText(
                "{loaders} loader processes on {cores} cores: fewer (`dataloader_num_workers`) may"
                " be faster",
                code="many-loader-processes",
                loaders=loaders * num_ranks,
                cores=cores,
            ),
        )
    wasted = notice_of_compression(layout.strategy, config, layout.axes)
    if wasted is not None:
        yield wasted


def check_task_batch(draft: Draft) -> None:
    """Check that the task can compute its loss with this number of samples."""
    task, derived = load_task(draft.config), known(draft.derived)
    task.check_batch(derived.global_batch_size)
    task.check_steps(derived.steps)


def check_shares(draft: Draft) -> Iterable[tuple[str, str]]:
    """Check that every replica gets part of the global batch, and report how they share it."""
    config, derived, data = draft.config, known(draft.derived), known(draft.data)
    num_rows = data.rows_per_epoch(config, derived.global_batch_size)
    yield from check_sizes(derived, num_rows, known(draft.layout).strategy)
    shared = sharing_text(config, derived)
    if shared is not None:
        yield "info", shared
    unbalanced = equal_notice(config, derived)
    if unbalanced is not None:
        yield unbalanced


def check_num_steps(draft: Draft) -> None:
    """Check that the strategy can train for this number of steps."""
    check_steps(known(draft.layout).strategy, draft.config, known(draft.derived).steps)


def check_selection(draft: Draft) -> Iterable[tuple[str, str]]:
    """Check that the settings that compare evaluations have evaluations to compare."""
    args = draft.config.train_args
    if known(draft.derived).eval_every_steps:
        check_best_metric(args, load_task(draft.config).metric_names(known(draft.data)))
        return
    is_off = args.eval_steps == "never"
    why = "`train_args.eval_steps: never` is set" if is_off else "there is no validation data"
    fix = "set `train_args.eval_steps`" if is_off else "set `val_dataset` or `split_dataset_ratio`"
    settings = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "save_best": args.save_best,
        "early_stopping": args.early_stopping is not None,
    }
    names = [f"`train_args.{name}`" for name, is_set in settings.items() if is_set]
    if names:
        raise ConfigError(
            "{names} compare evaluations, and {why}",
            code="no-validation-data",
            fix="{advice}, or remove these settings",
            names=" and ".join(names),
            why=why,
            advice=fix,
        )
    if args.metric_for_best_model is not None:
        yield (
            "warning",
            UserText(
                "`train_args.metric_for_best_model` has no effect: {why}",
                code="best-metric-without-effect",
                why=why,
            ),
        )


def check_profile(draft: Draft) -> None:
    """Check that the steps that are profiled are part of the run."""
    profile, steps = draft.config.train_args.profile, known(draft.derived).steps
    if profile is not None and profile.last_step > steps:
        raise ConfigError(
            "`train_args.profile`: step {last_step} is to be recorded, and the run has"
            " {steps:step}",
            code="profile-beyond-end",
            fix="lower `profile.start_step` or `profile.num_steps`",
            last_step=profile.last_step,
            steps=steps,
        )


def sharing_text(config: Config, derived: ResolvedValues) -> str | None:
    """Describe how the replicas share the global batch if the run resumes with a different number
    of replicas or size of micro-batches. Return None if the config is unchanged."""
    configured = config.train_args.gradient_accumulation_steps
    accumulation = derived.gradient_accumulation_steps
    batch = counted(derived.global_batch_size, "sample")
    replicas = counted(derived.replicas, "replica")
    shares = derived.shares if derived.global_batch_size % derived.replicas else None
    if accumulation != configured:
        return UserText(
            "gradient_accumulation_steps: {configured} → {accumulation}, which keeps the run's"
            " global batch of {batch} on {replicas}{listed}",
            code="accumulation-changed",
            configured=configured,
            accumulation=accumulation,
            batch=batch,
            samples=derived.global_batch_size,
            replicas=replicas,
            num_replicas=derived.replicas,
            listed=f", as {shares}" if shares else "",
            shares=str(shares or ""),
        )
    if not shares:
        return None
    return UserText(
        "{replicas}: {batch} of the global batch as {shares}",
        code="unequal-shares",
        replicas=replicas,
        batch=batch,
        samples=derived.global_batch_size,
        num_replicas=derived.replicas,
        shares=str(shares),
    )


def check_sizes(derived: ResolvedValues, samples: int | None, mode: str) -> list[Notice]:
    """Check that every replica gets part of the run's global batch, and that the warm-up ends.

    Args:
        mode: name of the strategy.
        samples: number of training samples; None if it is unknown. It may be smaller than the
            global batch or the number of replicas: missing rows are padded with zero weight, which
            changes neither the loss nor the gradient.

    Returns:
        The notices to log.

    Raises:
        ConfigError: if there are no training samples, or more replicas than samples in the global
            batch of a resumed run or, in a mode whose replicas train separately, in the dataset.
    """
    if samples is None:
        samples = derived.global_batch_size
    if samples == 0:
        raise ConfigError(
            "the dataset contains no training sample",
            code="no-training-samples",
            fix="check `dataset` and `max_length`",
        )
    if derived.replicas > samples and mode in OTHER_TRAINING:
        raise ConfigError(
            "`parallel.mode: {mode}` trains each worker on separate samples, but there are"
            " {replicas} workers and only {samples:training sample}",
            code="too-few-samples-for-workers",
            fix="set `parallel.num_gpus` to at most {samples}, use `parallel.mode: ddp`, or add"
            " data",
            mode=mode,
            replicas=derived.replicas,
            samples=samples,
        )
    if derived.replicas > derived.global_batch_size:
        max_ranks = derived.global_batch_size * (derived.world_size // derived.replicas)
        raise ConfigError(
            "the run's global batch of {global_batch_size:sample} cannot be shared among"
            " {replicas} replicas: some would have nothing to train on",
            code="batch-too-small-for-replicas",
            fix="set `parallel.num_gpus` to at most {max_ranks}, or split the model over the ranks"
            " (`parallel.tensor`, `parallel.pipeline`), or set another `output_dir` for a new"
            " run",
            global_batch_size=derived.global_batch_size,
            replicas=derived.replicas,
            max_ranks=max_ranks,
        )
    warm_up = _warm_up_notices(derived)
    if derived.global_batch_size <= samples:
        return warm_up
    all_samples = (
        "the only training sample" if samples == 1 else f"all {samples:,} training samples"
    )
    idle = max(0, derived.replicas - samples)
    text = UserText(
        "the global batch of {batch:sample} ({micro_batch} per micro-batch × {accumulation}"
        " accumulation × {replicas:replica}) is larger than the dataset: each step trains on"
        " {all_samples}, and the missing rows are padded with zero weight{padding}",
        code="batch-larger-than-dataset",
        batch=derived.global_batch_size,
        micro_batch=derived.micro_batch_size,
        accumulation=derived.gradient_accumulation_steps,
        replicas=derived.replicas,
        all_samples=all_samples,
        samples=samples,
        padding=f". {counted(idle, 'replica')} of {derived.replicas}"
        f" {'gets' if idle == 1 else 'get'} padding only; {counted(samples, 'replica')} would train"
        " on the same samples"
        if idle
        else "",
        idle=idle or None,
    )
    return [*warm_up, Notice("warning", text)]


def _warm_up_notices(derived: ResolvedValues) -> list[Notice]:
    warmup, steps = derived.warmup_steps, derived.steps
    if warmup <= steps:
        return []
    last = derived.learning_rate * (steps - 1) / warmup  # the first step of a warm-up has rate 0
    text = UserText(
        "the warm-up of {warmup} steps is longer than the training of {steps:step}, so the"
        " learning rate only reaches about {last} of {learning_rate}; lower"
        " `train_args.warmup_steps`, or train longer",
        code="warmup-too-long",
        warmup=f"{warmup:,}",
        steps=steps,
        last=f"{last:.2g}",
        learning_rate=f"{derived.learning_rate:g}",
    )
    return [Notice("warning", text)]

"""What is known from the config and the environment alone: passes and checks that take
milliseconds, before the devices are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.format import name_of
from paceline.checkpoint.urls import check_url, is_url
from paceline.config.metrics.evaluation import check_lm_eval, check_metrics
from paceline.config.packages import check_loggers, check_optimizer_package
from paceline.config.schema.grpo import check_completions_per_batch
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.distributed.environment import scheduled_host, with_scheduler
from paceline.launch.after_training.hub_upload import check_hub_upload
from paceline.launch.passes.checkpoint import check_checkpoint_dir, check_output_dir
from paceline.launch.passes.draft import Draft
from paceline.models.files import fit_to_model
from paceline.parallel.registry import mode_of
from paceline.tasks import check_inputs
from paceline.train.answers.text_metrics import load_user_metrics


def apply_scheduler(draft: Draft) -> Draft:
    """Fill in the hosts that a scheduler such as Slurm gave to this job. An outer launcher has read
    them already."""
    if draft.outer is not None:
        return draft
    parallel = with_scheduler(draft.config.parallel, scheduled_host())
    return draft.with_config(draft.config.model_copy(update={"parallel": parallel}))


def fit_length(draft: Draft) -> Draft:
    """Set what the files of the model determine: the largest length, and the settings of an adapter
    whose training continues."""
    return replace(draft, loaded=fit_to_model(draft.loaded))


def notices_of_config(draft: Draft) -> Sequence[Notice]:
    """Return the notices about how the config was read."""
    return [Notice(*notice) for notice in draft.loaded.notices]


def check_mode(draft: Draft) -> None:
    """Check that ``parallel.mode`` names a strategy."""
    mode_of(draft.config.parallel)


def check_folders(draft: Draft) -> None:
    """Check that ``output_dir`` and ``checkpoint_dir`` can be written."""
    config = draft.config
    check_output_dir(Path(config.output_dir))
    if config.checkpoint_dir is not None:
        check_checkpoint_dir(config.checkpoint_dir, Path(config.output_dir))


def check_resume(draft: Draft) -> None:
    """Check that ``resume`` names an existing checkpoint, or a valid URL."""
    setting = draft.config.resume
    if is_url(setting):
        check_url("resume", setting)
    elif setting not in ("auto", "never") and not Path(setting).exists():
        raise ConfigError(
            "`resume: {setting}` does not exist",
            code="missing-resume-checkpoint",
            allowed="auto, never, or a checkpoint such as RUN/checkpoints/{example}",
            fix="check the path, or remove `resume`: the default resumes the latest checkpoint",
            setting=setting,
            example=name_of(40),
        )


def check_packages(draft: Draft) -> None:
    """Check that the packages of the loggers and of the optimizer are installed."""
    check_loggers(draft.config)
    check_optimizer_package(draft.config.train_args.optim)


def check_metric_settings(draft: Draft) -> None:
    """Check the metrics of evaluations, the user's own included."""
    check_metrics(draft.config)
    load_user_metrics(draft.config)


def check_uploads(draft: Draft) -> None:
    """Check what follows the training: the upload to the hub, and lm-evaluation-harness."""
    check_hub_upload(draft.config)
    check_lm_eval(draft.config)


def check_files(draft: Draft) -> None:
    """Check that local files of a language model and of its data exist. The task checks this too,
    but it imports torch first, which takes seconds. Ranks of an outer launcher
    import it anyway, and report together what is missing on their hosts."""
    if draft.outer is None:
        check_inputs(draft.config)


def check_rewards(draft: Draft) -> None:
    """Check that the functions, packages and models of the rewards exist, and that a given global
    batch has whole groups of completions: without that, no mode would be possible."""
    if draft.config.rewards:
        from paceline.rewards.functions import check_reward_sources  # not needed by most runs

        check_reward_sources(draft.config)
        size = draft.config.train_args.global_batch_size
        if size is not None:
            check_completions_per_batch(size, draft.config.grpo)

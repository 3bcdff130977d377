"""The section ``grpo`` of the schema: reinforcement learning on completions that the model
generates."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from paceline.config.schema.base import CombinationError, Section, Text
from paceline.config.schema.rewards import OF_ENVIRONMENT, RewardEntry, names_object
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText

#: The value of `grpo.beta` if the config has none.
_BETAS = {"grpo": 0.0, "rloo": 0.05}
#: Settings that only one of the tasks uses.
_TASK_OF = {
    "loss_type": "grpo",
    "importance_sampling_level": "grpo",
    "scale_rewards": "grpo",
    "normalize_advantages": "rloo",
    "reward_clip_range": "rloo",
}


def _check_loss(name: object) -> object:
    if name == "bnpo":
        raise ValueError(
            UserText(
                "`bnpo` is not supported: it divides by the number of tokens in a micro-batch, so"
                " the result would depend on how the batch is divided; `dapo` divides by the tokens"
                " of the whole batch",
                code="loss-of-micro-batch",
            )
        )
    return name


def _as_scale(value: object) -> object:
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def _check_range(value: list[float] | None) -> list[float] | None:
    if value is not None and (len(value) != 2 or value[0] >= value[1]):
        raise ValueError(
            UserText(
                "give two numbers, the lower one first, such as [-10, 10]",
                code="invalid-clip-range",
            )
        )
    return value


def _check_environment(value: str | None) -> str | None:
    if value is not None and not names_object(value):
        raise ValueError(
            UserText(
                "`{value}` names no class; write ./file.py:NAME or package.module:NAME",
                code="environment-without-class",
                value=value,
            )
        )
    return value


GroupLoss = Literal["grpo", "dr_grpo", "dapo"]


Engine = Literal["generate", "continuous_batching", "vllm"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def _check_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError(
            UserText("give an address such as http://localhost:8000", code="not-a-url")
        )
    return value.rstrip("/")


class RolloutEngine(Section):
    """The keys of ``grpo`` about the engine. Those about vLLM and the correction are named as in
    TRL."""

    engine: Literal["auto", "generate", "continuous_batching", "vllm"] = Field(
        "auto",
        description=(
            "What generates the completions. `generate`: the forward pass of training with a cache,"
            " one prompt after the other. `continuous_batching`: transformers' engine for many"
            " requests. `vllm`: vLLM, which is untested. `auto` is `generate`."
        ),
    )
    importance_sampling_correction: bool | None = Field(
        None,
        description=(
            "Multiply the loss by the ratio of the probabilities in training to those with which"
            " the tokens were drawn. Default: with every engine except `generate`, which computes"
            " the same probabilities."
        ),
    )
    importance_sampling_mode: CorrectionMode | None = Field(
        None,
        description=(
            "Whether the ratio is one of each token or of a completion, and whether ratios outside"
            " of the limits are set to the limit (`truncate`) or to 0 (`mask`). Default:"
            " `token_truncate` for `grpo`, `sequence_truncate` for `rloo`."
        ),
    )
    importance_sampling_clip_max: float | None = Field(
        3.0, gt=0, description="Upper limit of the ratio; null for none."
    )
    importance_sampling_clip_min: float | None = Field(
        None, ge=0, description="Lower limit of the ratio. Default: none."
    )
    vllm_mode: Literal["colocate", "server"] = Field(
        "colocate",
        description=(
            "Whether each rank has a vLLM of its own on its GPU, or all ranks use a server that has"
            " been started with `vllm serve`."
        ),
    )
    vllm_server_base_url: Annotated[Text, AfterValidator(_check_url)] = Field(
        "http://localhost:8000", description="Address of the server."
    )
    vllm_server_timeout: float = Field(
        240.0, gt=0, description="Seconds to wait for the server at the start."
    )
    vllm_group_port: int = Field(
        51216,
        ge=1,
        le=65535,
        description="Port of rank 0 through which the server receives the weights.",
    )
    vllm_gpu_memory_utilization: float = Field(
        0.3, gt=0, lt=1, description="Share of the GPU's memory for a vLLM of the rank."
    )
    vllm_max_model_length: int | None = Field(
        None,
        ge=1,
        description=(
            "Longest prompt and completion together, in tokens, for a vLLM of the rank. Default:"
            " `train_args.max_length`."
        ),
    )
    vllm_enable_sleep_mode: bool = Field(
        False, description="Free the memory of the rank's vLLM between rollouts."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        lowest, highest = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if lowest is not None and highest is not None and lowest > highest:
            raise CombinationError(
                UserText(
                    "importance_sampling_clip_min: {lowest} is above importance_sampling_clip_max:"
                    " {highest}",
                    code="clip-limits-reversed",
                    lowest=lowest,
                    highest=highest,
                ),
                "grpo.importance_sampling_clip_min",
                "grpo.importance_sampling_clip_max",
            )
        return self

    @property
    def engine_used(self) -> Engine:
        """The engine of the config, or the one that ``auto`` stands for, which is tested and gives
        the same completions on any number of ranks."""
        return "generate" if self.engine == "auto" else self.engine

    @property
    def corrects_probabilities(self) -> bool:
        """Whether the loss is multiplied by ratios of probabilities."""
        if self.importance_sampling_correction is None:
            return self.engine_used != "generate"
        return self.importance_sampling_correction


class Grpo(RolloutEngine):
    """Settings of `task: grpo` and `rloo`, named as in TRL."""

    num_generations: int = Field(
        8, ge=2, description="Completions per prompt, whose rewards are compared with each other."
    )
    max_completion_length: int = Field(
        512, ge=1, description="Longest completion in tokens; longer ones are cut off."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature of sampling.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens with this total probability.",
    )
    top_k: int | None = Field(
        0, ge=0, description="Sample from this many most likely tokens; 0 or null: from all."
    )
    num_iterations: int = Field(
        1, ge=1, description="Optimizer steps on the completions of each batch."
    )
    beta: float | None = Field(
        None,
        ge=0,
        description=(
            "Weight of the divergence from the model before training. Default: 0 for `grpo`, which"
            " then needs no reference model, and 0.05 for `rloo`."
        ),
    )
    epsilon: float = Field(
        0.2,
        ge=0,
        le=1,
        description="The ratio of new to old probability is clipped below 1 - `epsilon`.",
    )
    epsilon_high: float | None = Field(
        None,
        ge=0,
        description=(
            "The ratio is clipped above 1 + `epsilon_high` (0.28 in the paper on DAPO). Default:"
            " `epsilon`."
        ),
    )
    loss_type: Annotated[GroupLoss, BeforeValidator(_check_loss)] = Field(
        "dapo",
        description=(
            "Loss of `task: grpo`, by the divisor of the sum over tokens. `dapo`: the number of"
            " completion tokens in the batch. `grpo`: the number of tokens of each completion, then"
            " the number of completions. `dr_grpo`: `max_completion_length` times the number of"
            " completions."
        ),
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token",
        description=(
            "`grpo`: ratio of new to old probability of each token, or the geometric mean over the"
            " completion (GSPO)."
        ),
    )
    scale_rewards: Annotated[Literal["group", "batch", "none"], BeforeValidator(_as_scale)] = Field(
        "group",
        description=(
            "`grpo`: standard deviation by which advantages are divided: the one of the rewards of"
            " a prompt, the one of the batch, or none. `true` means `group`, `false` means `none`."
        ),
    )
    normalize_advantages: bool = Field(
        False,
        description="`rloo`: give the advantages of a batch the mean 0 and the variance 1.",
    )
    reward_clip_range: Annotated[list[float] | None, AfterValidator(_check_range)] = Field(
        None,
        description="`rloo`: range to which rewards are clipped, such as `[-10, 10]`.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Leave completions that were cut off out of the loss."
    )
    dynamic_sampling: bool = Field(
        False,
        description=(
            "Skip prompts whose completions all have the same reward, and draw other prompts until"
            " the batch is full (DAPO)."
        ),
    )
    environment: Annotated[Text | None, AfterValidator(_check_environment)] = Field(
        None,
        description=(
            "Class whose methods the model may call as tools, as `./file.py:NAME`. Completions then"
            " have several turns; each completion has an instance of its own."
        ),
    )
    max_turns: int | None = Field(
        None,
        ge=1,
        description=(
            "Largest number of turns that the model writes in a completion with an `environment`."
            " Default: no limit besides `max_completion_length`."
        ),
    )
    reward_timeout_s: float = Field(
        60.0,
        gt=0,
        description=(
            "Seconds that a reward may take for the completions of one prompt, and an `environment`"
            " for the tool calls of one turn."
        ),
    )
    reward_workers: int | None = Field(
        None,
        ge=1,
        description="Processes per rank that compute rewards. Default: by the number of cores.",
    )
    keep_rollouts: int = Field(
        20,
        ge=0,
        description="Number of the latest steps whose completions and rewards are kept on disk.",
    )
    replay: Text | None = Field(
        None,
        description="Folder with completions of another run, to train on instead of new ones.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replay is not None and self.dynamic_sampling:
            raise CombinationError(
                UserText(
                    "dynamic_sampling: true is not supported with replay: no completions are"
                    " generated; remove one of them",
                    code="replay-with-dynamic-sampling",
                ),
                "grpo.dynamic_sampling",
                "grpo.replay",
            )
        if self.max_turns is not None and self.environment is None:
            raise CombinationError(
                UserText(
                    "max_turns: {max_turns} has no effect without environment: completions have a"
                    " single turn; set grpo.environment, or remove max_turns",
                    code="turns-without-environment",
                    max_turns=self.max_turns,
                ),
                "grpo.max_turns",
            )
        return self

    def beta_of(self, task: str) -> float:
        """Return the weight of the divergence: the one of the config, or the task's default."""
        return _BETAS[task] if self.beta is None else self.beta

    def correction_mode(self, task: str) -> CorrectionMode:
        """Return how the ratios of :attr:`corrects_probabilities` are limited."""
        default: CorrectionMode = "sequence_truncate" if task == "rloo" else "token_truncate"
        return self.importance_sampling_mode or default

    def workers_per_rank(self, cores: int, ranks_on_host: int) -> int:
        """Return the number of reward processes of a rank: the one of the config, or its share of
        the cores of the host."""
        return self.reward_workers or max(1, cores // ranks_on_host)

    def unused(self, task: str) -> list[str]:
        """Return the names of the settings that have been changed and that a task does not use."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
            and (task not in _BETAS or _TASK_OF.get(name, task) != task)
        ]


def check_completions_per_batch(global_batch_size: int, settings: Grpo) -> None:
    """Check that the completions of a batch, which the batch size counts, are whole groups.

    Raises:
        ConfigError: the batch size is not a multiple of ``num_generations``.
    """
    size = settings.num_generations
    if global_batch_size > 0 and global_batch_size % size == 0:
        return
    below = global_batch_size // size * size
    raise ConfigError(
        "a global batch of {global_batch_size:completion} is not a multiple of"
        " `grpo.num_generations: {size}`, so a prompt would have fewer completions",
        code="batch-divides-groups",
        allowed="{nearest}",
        fix=(
            "change `train_args.global_batch_size` (or `per_device_train_batch_size` and"
            " `gradient_accumulation_steps`), or `grpo.num_generations`"
        ),
        global_batch_size=global_batch_size,
        size=size,
        nearest=f"{below} or {below + size}" if below else str(size),
    )


def check_rewards(task: str, rewards: list[RewardEntry], settings: Grpo) -> None:
    """Raise CombinationError if the rewards do not fit the task or the other settings."""
    has_rollouts = task in ROLLOUT_TASKS
    if has_rollouts and not rewards:
        raise CombinationError(
            UserText(
                "task: {task} requires rewards: add e.g. rewards: [{name: exact}], or a function of"
                " your own as {function: ./rewards.py:NAME}",
                code="no-rewards",
                task=task,
            ),
            "task",
        )
    if rewards and not has_rollouts:
        raise CombinationError(
            UserText(
                "rewards is not supported with task: {task}: set task: grpo or task: rloo, or"
                " remove rewards",
                code="rewards-with-task",
                task=task,
            ),
            "task",
            "rewards",
        )
    for number, reward in enumerate(rewards, 1):
        if reward.name == OF_ENVIRONMENT and settings.environment is None:
            raise CombinationError(
                UserText(
                    "entry {number} of rewards: name: environment requires grpo.environment, the"
                    " class whose method get_reward it calls",
                    code="reward-without-environment",
                    number=number,
                ),
                "rewards",
            )
        limit = reward.max_length or settings.max_completion_length
        if reward.cache is not None and reward.cache > limit:
            raise CombinationError(
                UserText(
                    "entry {number} of rewards: cache: {cache} is more than the {limit} tokens at"
                    " which the reward is -1",
                    code="overlong-cache",
                    number=number,
                    cache=reward.cache,
                    limit=limit,
                ),
                "rewards",
            )

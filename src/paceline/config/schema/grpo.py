"""The section ``grpo`` and the list ``rewards`` of the schema: reinforcement learning on
completions that the model generates, with rewards that are computed from them."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from paceline.config.schema.base import CombinationError, Section, Text
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText

#: The built-in rewards, and the options of each.
REWARDS: dict[str, tuple[str, ...]] = {
    "math": ("column",),
    "exact": ("column",),
    "choice": ("column",),
    "format": ("pattern",),
    "soft_overlong": ("max_length", "cache"),
    "environment": (),
}
#: The built-in reward that an environment computes.
OF_ENVIRONMENT = "environment"
#: What an entry of ``rewards`` is, one key each.
_KINDS = ("function", "name", "model")
#: Reasoning in a single pair of tags at the start, then the answer.
THINK_PATTERN = r"<think>(?!.*<think>).*?</think>.*"
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


class RewardEntry(Section):
    """One entry of `rewards`. :func:`_check_entries` has checked its keys."""

    function: Text | None = None
    name: Text | None = None
    model: Text | None = None
    weight: float = 1.0
    column: Text | None = None
    pattern: Text | None = None
    max_length: int | None = None
    cache: int | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = serialize(self)
        return {key: value for key, value in values.items() if value is not None}

    @property
    def answer_column(self) -> str | None:
        """The column with the right answer; None for a reward that reads none."""
        reads_answer = self.name is not None and "column" in REWARDS[self.name]
        return (self.column or "answer") if reads_answer else None

    @property
    def label(self) -> str:
        """The name of the reward in figures and messages."""
        if self.function is not None:
            return self.function.strip().rpartition(":")[2]
        return self.name or re.split(r"[/\\]", (self.model or "").rstrip("/\\"))[-1]


def reward_labels(rewards: list[RewardEntry]) -> list[str]:
    """Return a different name for each reward: its label, with a number if it occurs again."""
    labels: list[str] = []
    for reward in rewards:
        label, number = reward.label, 2
        while label in labels:
            label, number = f"{reward.label}_{number}", number + 1
        labels.append(label)
    return labels


def _check_entries(value: object) -> object:
    """Check the keys of the entries before pydantic does, which would not name the entry."""
    entries = [value] if isinstance(value, dict | RewardEntry) else value
    if not isinstance(entries, list):
        return entries
    return [
        entry if isinstance(entry, RewardEntry) else _check_entry(number, entry)
        for number, entry in enumerate(entries, 1)
    ]


def _check_entry(number: int, entry: object) -> dict[str, JsonValue]:
    if not isinstance(entry, dict):
        raise ValueError(
            UserText(
                "entry {number} is not a mapping; write {function: ./rewards.py:NAME},"
                " {name: NAME} or {model: FOLDER}",
                code="reward-not-a-mapping",
                number=number,
            )
        )
    fields = {str(key): value for key, value in entry.items() if value is not None}
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise ValueError(
            UserText(
                "entry {number} must have exactly one of the keys function, name and model",
                code="reward-without-kind",
                number=number,
            )
        )
    _check_texts(number, fields)
    if "name" in fields and fields["name"] not in REWARDS:
        raise ValueError(
            UserText(
                "entry {number}: there is no built-in reward `{name}`; choose from {known}, or name"
                " a function of your own: {function: ./rewards.py:NAME}",
                code="unknown-reward",
                number=number,
                name=fields["name"],
                known=", ".join(REWARDS),
            )
        )
    _check_options(number, kinds[0], fields)
    return fields


def _check_texts(number: int, fields: Mapping[str, JsonValue]) -> None:
    for key in (*_KINDS, "column", "pattern"):
        value = fields.get(key, "text")
        if not isinstance(value, str) or not value.strip():
            raise _invalid(number, key, value, "text that is not empty")
    weight = fields.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise _invalid(number, "weight", weight, "a finite number")
    if not _names_object(str(fields.get("function", "./file.py:name"))):
        form = "./file.py:NAME or package.module:NAME"
        raise _invalid(number, "function", fields["function"], form)


def _names_object(text: str) -> bool:
    """Return whether a text has the form ``LOCATION:NAME``."""
    location, _, name = text.strip().rpartition(":")
    return bool(location) and name.isidentifier()


def _check_options(number: int, kind: str, fields: Mapping[str, JsonValue]) -> None:
    options = REWARDS[str(fields["name"])] if kind == "name" else ()
    for key in fields:
        if key not in (kind, "weight", *options):
            raise ValueError(
                UserText(
                    "entry {number}: `{key}` is not an option of {kind}: {value}; its keys are"
                    " {accepted_keys}",
                    code="unknown-reward-option",
                    number=number,
                    key=key,
                    kind=kind,
                    value=fields[kind],
                    accepted_keys=", ".join((kind, "weight", *options)),
                )
            )
    for key, lowest in (("max_length", 1), ("cache", 0)):
        value = fields.get(key, lowest)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise _invalid(number, key, value, f"a whole number of at least {lowest}")
    if kind == "name" and fields["name"] == "soft_overlong" and "cache" not in fields:
        raise ValueError(
            UserText(
                "entry {number}: soft_overlong requires `cache`, the number of tokens before"
                " max_length within which the reward falls from 0 to -1",
                code="overlong-without-cache",
                number=number,
            )
        )
    _check_pattern(number, fields.get("pattern"))


def _check_pattern(number: int, pattern: JsonValue) -> None:
    if not isinstance(pattern, str):
        return
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            UserText(
                "entry {number}: `pattern: {pattern}` is not a valid regular expression: {reason}",
                code="invalid-reward-pattern",
                number=number,
                pattern=pattern,
                reason=error,
            )
        ) from None


def _invalid(number: int, key: str, value: object, form: str) -> ValueError:
    return ValueError(
        UserText(
            "entry {number}: `{key}: {value}` is not accepted; it must be {form}",
            code="invalid-reward-option",
            number=number,
            key=key,
            value=value,
            form=form,
        )
    )


#: The rewards of a run; one may be written without a list.
Rewards = Annotated[list[RewardEntry], BeforeValidator(_check_entries)]


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
    if value is not None and not _names_object(value):
        raise ValueError(
            UserText(
                "`{value}` names no class; write ./file.py:NAME or package.module:NAME",
                code="environment-without-class",
                value=value,
            )
        )
    return value


GroupLoss = Literal["grpo", "dr_grpo", "dapo"]


class Grpo(Section):
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
    engine: Literal["auto", "generate", "continuous_batching", "vllm"] = Field(
        "auto", description="What generates the completions."
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

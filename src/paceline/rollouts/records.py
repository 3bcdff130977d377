"""A rollout: the groups of completions that one or more updates train on, and its file.

A file has a JSON object in each line for each completion. Numbers are written such that they are
read with the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.files import write_atomic
from paceline.rollouts.decoding import Completion, Episode

#: Name of the folder of the files in the folder of a run.
FOLDER = "rollouts"


@dataclass
class RolloutGroup:
    """The completions of a prompt.

    Args:
        prompt: index of the prompt in the dataset.
        prompt_ids: token ids of the prompt.
        scores: reward of each kind of each completion, NaN where it does not apply, float32
            [completions, rewards].
        texts: the text of each completion.
        prompt_text: the text of the prompt with special tokens.
    """

    prompt: int
    prompt_ids: list[int]
    completions: list[Completion]
    scores: np.ndarray
    texts: list[str] = field(default_factory=list)
    prompt_text: str = ""

    def prompt_of(self, completion: Completion) -> list[int]:
        """Return the token ids of the prompt of a completion, to which an environment may have
        added."""
        own = None if completion.episode is None else completion.episode.prompt_ids
        return self.prompt_ids if own is None else own

    def prompt_text_of(self, completion: Completion) -> str:
        """Return the text of the same prompt."""
        own = "" if completion.episode is None else completion.episode.prompt_text
        return own or self.prompt_text


@dataclass
class Rollout:
    """The groups of a rollout.

    Args:
        step: number of steps completed before it was generated.
        rewards: weighted sum of the rewards, NaN for a completion without one, float64 [groups,
            completions].
        advantages: float64 [groups, completions].
        old_logps: log-probabilities of each completion's tokens with the weights that generated it,
            computed as in training; None if the first update computes them.
        reference_logps: the same with the reference model, or None without one.
        num_skipped: number of groups that were left out because all of their rewards are equal.
    """

    step: int
    groups: list[RolloutGroup]
    rewards: np.ndarray
    advantages: np.ndarray
    old_logps: list[list[float]] | None = None
    reference_logps: list[list[float]] | None = None
    num_skipped: int = 0

    @property
    def calls_tools(self) -> bool:
        """Whether the completions come from an environment."""
        return any(each.episode is not None for _, each in self.completions)

    @property
    def completions(self) -> list[tuple[RolloutGroup, Completion]]:
        """The completions of all groups, with their groups."""
        return [(group, completion) for group in self.groups for completion in group.completions]


class ToolFields(TypedDict, total=False):
    """The fields of a line that only completions of an environment have.

    Attributes:
        loss_mask: 1 for each token that the model has drawn, 0 for the others.
        tool_calls, tool_failures: number of the tool calls, and of those that failed.
    """

    loss_mask: list[int]
    tool_calls: int
    tool_failures: int


class CompletionRecord(ToolFields):
    """A line of a file.

    Attributes:
        prompt: index of the prompt in the dataset.
        index: number of the completion in its group.
        logprobs: log-probability of each token of the completion when it was drawn.
        rewards: reward of each kind by name, None where it does not apply.
        reward: weighted sum of the rewards, None if none applies.
        truncated: whether the completion reached the largest length.
        prompt_text: the text of the prompt with special tokens.
        completion: the text of the completion without special tokens.
    """

    prompt: int
    index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float
    truncated: bool
    prompt_text: str
    completion: str


def rollout_file(folder: Path, step: int) -> Path:
    """Return the file of the rollout that the update ``step`` (from 1) is the first to use."""
    return folder / f"step-{step:08d}.jsonl"


def write_rollout(folder: Path, rollout: Rollout, names: Sequence[str], keep: int) -> None:
    """Write a rollout, and delete the oldest files.

    Args:
        names: names of the rewards.
        keep: number of files to keep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records_of(rollout, names)]
    write_atomic(rollout_file(folder, rollout.step + 1), "".join(f"{line}\n" for line in lines))
    for path in sorted(folder.glob("step-*.jsonl"))[:-keep]:
        path.unlink(missing_ok=True)


def records_of(rollout: Rollout, names: Sequence[str]) -> list[CompletionRecord]:
    """Return the lines of a rollout's file."""
    return [
        {
            "prompt": group.prompt,
            "index": index,
            "prompt_ids": group.prompt_of(completion),
            "completion_ids": completion.ids,
            "logprobs": completion.logps,
            "rewards": {
                name: _finite(float(score))
                for name, score in zip(names, group.scores[index], strict=True)
            },
            "reward": _finite(float(rollout.rewards[number, index])),
            "advantage": float(rollout.advantages[number, index]),
            "truncated": completion.is_truncated,
            "prompt_text": group.prompt_text_of(completion),
            "completion": group.texts[index] if group.texts else "",
            **_tool_fields(completion),
        }
        for number, group in enumerate(rollout.groups)
        for index, completion in enumerate(group.completions)
    ]


def _tool_fields(completion: Completion) -> ToolFields:
    episode = completion.episode
    if episode is None:
        return {}
    return {
        "loss_mask": [int(has_loss) for has_loss in episode.loss_mask],
        "tool_calls": episode.num_calls,
        "tool_failures": episode.num_failures,
    }


def read_groups(path: Path, names: Sequence[str], num_generations: int) -> list[RolloutGroup]:
    """Read the groups of a file.

    Args:
        names: names of the rewards that each completion must have.
        num_generations: number of completions of each group.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records: list[CompletionRecord] = [json.loads(line) for line in lines]
        groups = groups_of_records(records, names, num_generations)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "{file} is not a rollout of this config: {reason}",
            code="not-a-rollout",
            allowed="a file that a run has written to its folder `rollouts`, with the same"
            " `rewards` and `grpo.num_generations`",
            file=path,
            reason=error if not isinstance(error, KeyError) else f"no {error}",
        ) from None
    return groups


def check_num_groups(path: Path, count: int, expected: int) -> None:
    """Raise ConfigError if a recorded rollout does not have the number of prompts of a step."""
    if count != expected:
        raise ConfigError(
            "{file} has {count:prompt}, and the step has {expected}",
            code="rollout-of-other-size",
            fix="use the batch size of the run that recorded it",
            file=path,
            count=count,
            expected=expected,
        )


def missing_rollout(folder: Path, step: int) -> ConfigError:
    """Return the error about a step, from 1, without a recorded rollout."""
    return ConfigError(
        "`grpo.replay` has no file {file}, and the run needs it for its update {step}",
        code="no-rollout-file",
        fix="record as many steps with `grpo.keep_rollouts`, or lower `train_args.max_steps`",
        file=rollout_file(folder, step),
        step=step,
    )


def groups_of_records(
    records: Sequence[CompletionRecord], names: Sequence[str], num_generations: int
) -> list[RolloutGroup]:
    """Return the groups of the lines of a file.

    Raises:
        ValueError, KeyError, TypeError: the lines do not make whole groups.
    """
    return [
        _group_of(records[start : start + num_generations], names, num_generations)
        for start in range(0, len(records), num_generations)
    ]


def _group_of(
    records: Sequence[CompletionRecord], names: Sequence[str], num_generations: int
) -> RolloutGroup:
    first = records[0]
    if [(record["prompt"], record["index"]) for record in records] != [
        (first["prompt"], index) for index in range(num_generations)
    ]:
        raise ValueError(
            f"the prompt {first['prompt']} does not have {num_generations} completions"
        )
    prompt_ids = [int(token) for token in first["prompt_ids"]]
    completions = [_completion_of(record, prompt_ids) for record in records]
    scores = [[_number(record["rewards"][name]) for name in names] for record in records]
    return RolloutGroup(
        int(first["prompt"]),
        prompt_ids,
        completions,
        np.array(scores, dtype=np.float32).reshape(len(records), len(names)),
        [str(record.get("completion", "")) for record in records],
        str(first.get("prompt_text", "")),
    )


def _completion_of(record: CompletionRecord, prompt_ids: list[int]) -> Completion:
    """Return a completion. ``prompt_ids``: the prompt of the first one of its group."""
    completion = Completion(record["completion_ids"], record["logprobs"], record["truncated"])
    if not completion.ids or len(completion.ids) != len(completion.logps):
        raise ValueError("a completion needs as many log-probabilities as tokens")
    own = [int(token) for token in record["prompt_ids"]]
    if "loss_mask" in record:
        mask = [bool(has_loss) for has_loss in record["loss_mask"]]
        if len(mask) != len(completion.ids) or not any(mask):
            raise ValueError("`loss_mask` needs as many values as tokens, and one that is 1")
        completion.episode = Episode(
            mask,
            int(record.get("tool_calls", 0)),
            int(record.get("tool_failures", 0)),
            prompt_ids=None if own == prompt_ids else own,
            prompt_text="" if own == prompt_ids else str(record.get("prompt_text", "")),
        )
    return completion


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)

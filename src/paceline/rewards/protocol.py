"""The messages between a rank and its reward processes: JSON lines over a socket."""

import signal
from typing import TypedDict

from pydantic import JsonValue

from paceline.core.errors import ErrorRecord
from paceline.rewards.group import Content

#: The signal with which the rank asks where a process is, before it kills it.
WHERE_SIGNAL = signal.SIGUSR1


class SetupRequest(TypedDict):
    """The first message to a process.

    Args:
        rewards: entries of ``rewards`` that the process computes, as in the config.
        max_completion_length: longest completion in tokens.
        timeout_s: seconds that a reward may take for the completions of a prompt.
    """

    rewards: list[dict[str, JsonValue]]
    max_completion_length: int
    timeout_s: float


class GroupRequest(TypedDict):
    """The completions of a prompt. ``number`` and ``step`` seed the random numbers."""

    number: int
    step: int
    prompt: Content
    completions: list[Content]
    completion_ids: list[list[int]]
    columns: dict[str, JsonValue]


class SetupReply(TypedDict):
    """The answer to the first message: the error with which a function was not loaded, if any."""

    error: ErrorRecord | None


class RewardProblem(TypedDict):
    """Why a reward has no values.

    Args:
        code: code of the error; see :mod:`paceline.rewards.failures`.
        reason: exception, or value that is not a reward.
        line: file, line and source of the user's code that raised it; empty if nothing was raised.
    """

    code: str
    reason: str
    line: str


class RewardReply(TypedDict, total=False):
    """The values of one reward for the completions of a prompt. A process sends one such message
    for each reward, in their order, up to the first problem."""

    values: list[float | None]
    problem: RewardProblem

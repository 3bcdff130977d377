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
        environment: class of environments, as in the config; None without one.
    """

    rewards: list[dict[str, JsonValue]]
    max_completion_length: int
    timeout_s: float
    environment: str | None


class ResetRequest(TypedDict):
    """The request to create and reset the environment of a completion.

    Args:
        session: number of the group of completions.
        index: number of the completion in its group.
        seed: what seeds the random numbers.
        row: arguments of ``reset``.
        is_first: whether the environments of earlier rollouts are no longer needed.
    """

    session: int
    index: int
    seed: str
    row: dict[str, JsonValue]
    is_first: bool


class RequestedCall(TypedDict):
    """A tool call that a model has written."""

    name: str
    arguments: JsonValue


class CallRequest(TypedDict):
    """The tool calls of a turn. ``session``, ``index`` and ``seed`` as in :class:`ResetRequest`."""

    session: int
    index: int
    seed: str
    calls: list[RequestedCall]


class GroupRequest(TypedDict):
    """The completions of a prompt. ``number`` and ``step`` seed the random numbers. ``session`` is
    the one of their environments; None without an environment."""

    session: int | None

    number: int
    step: int
    prompts: list[Content]
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


class ResetReply(TypedDict, total=False):
    """The answer to :class:`ResetRequest`: a text for the prompt, or None; or a problem."""

    observation: str | None
    problem: RewardProblem


class ToolResult(TypedDict):
    """The result of a tool call, or the text of the error, if it failed."""

    name: str
    content: str
    has_failed: bool


class CallReply(TypedDict, total=False):
    """The answer to :class:`CallRequest`: the result of each call, or a problem."""

    results: list[ToolResult]
    problem: RewardProblem


class RewardReply(TypedDict, total=False):
    """The values of one reward for the completions of a prompt. A process sends one such message
    for each reward, in their order, up to the first problem."""

    values: list[float | None]
    problem: RewardProblem

"""The environments in a reward process: a class of the user, with one instance per completion.

Nothing that a model has written is executed as code: a call names a method of the class.
"""

import asyncio
import inspect
import random
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from paceline.core.user_code import error_summary, load_environment, tool_methods
from paceline.rewards.protocol import (
    CallReply,
    CallRequest,
    RequestedCall,
    ResetReply,
    ResetRequest,
    RewardProblem,
    ToolResult,
)

#: Longest result of a tool in characters, for each token of the longest completion. What is longer
#: does not fit into a completion.
_CHARS_PER_TOKEN = 1000


class Resettable(Protocol):
    """An environment of the user, which has tools besides."""

    def reset(self, **row: JsonValue) -> object: ...


class EnvironmentHost:
    """The environments of the completions whose rewards this process will compute.

    Args:
        text: the class, as in the config.
        max_tokens: longest completion in tokens.

    Raises:
        ConfigError: the class is not an environment.
    """

    def __init__(self, text: str, max_tokens: int) -> None:
        self._class = load_environment(text)
        self._file = str(getattr(sys.modules[self._class.__module__], "__file__", None))
        self._tools = tool_methods(self._class)
        self._max_chars = max_tokens * _CHARS_PER_TOKEN
        self._instances: dict[int, dict[int, Resettable]] = {}

    def reset(self, request: ResetRequest) -> ResetReply:
        """Create and reset the environment of a completion."""
        if request["is_first"]:
            self._instances.clear()
        random.seed(request["seed"])
        what = "the class"
        try:
            instance: Resettable = self._class()
            what = "`reset`"
            observation = awaited(instance.reset(**request["row"]))
        except BaseException as error:
            return {"problem": self._problem(what, error)}
        if observation is not None and not isinstance(observation, str):
            reason = f"`reset` returned a value of type {type(observation).__name__}"
            return {"problem": {"code": "not-an-observation", "reason": reason, "line": ""}}
        self._instances.setdefault(request["session"], {})[request["index"]] = instance
        return {"observation": None if observation is None else _valid(observation)}

    def call(self, request: CallRequest) -> CallReply:
        """Execute the tool calls of a turn. The error of a tool becomes its result."""
        instance = self._instances[request["session"]][request["index"]]
        random.seed(request["seed"])
        try:
            return {"results": [self._result(instance, call) for call in request["calls"]]}
        except BaseException as error:  # the tool has ended the process, as with `sys.exit`
            return {"problem": self._problem("a tool", error)}

    def take(self, session: int) -> list[object]:
        """Return the environments of a group of completions, and forget them."""
        by_index = self._instances.pop(session)
        return [by_index[index] for index in sorted(by_index)]

    def _result(self, instance: object, call: RequestedCall) -> ToolResult:
        name, arguments = call["name"], call["arguments"]
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            content = str(awaited(_call(getattr(instance, name), arguments)))
            has_failed = False
        except Exception as error:
            content, has_failed = str({"error": str(error)}), True
        return {
            "name": name,
            "content": _valid(content[: self._max_chars]),
            "has_failed": has_failed,
        }

    def _problem(self, what: str, error: BaseException) -> RewardProblem:
        traceback.print_exc()
        line = line_of(error, self._file)
        reason = f"{what} raised {error_summary(error)}"
        return {"code": "environment-failed", "reason": reason, "line": line}


def _call(tool: Callable[..., object], arguments: JsonValue) -> object:
    if not isinstance(arguments, dict):
        raise TypeError("The arguments are not a JSON object.")
    return tool(**arguments)


def _valid(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")


def awaited(returned: object) -> object:
    """Return what user code returned, or what it computes later if it is asynchronous."""
    return _event_loop().run(_wait(returned)) if inspect.isawaitable(returned) else returned


async def _wait(returned: Awaitable[object]) -> object:
    return await returned


@cache
def _event_loop() -> asyncio.Runner:
    """Return the event loop, which connections that user code keeps belong to."""
    return asyncio.Runner()


def line_of(error: BaseException, file: str) -> str:
    """Return the last line of the user's file that an exception comes from, or else the last
    line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == Path(file)]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}" + (f": `{frame.line}`" if frame.line else "")

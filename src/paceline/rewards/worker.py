"""A process that computes rewards: ``python -m paceline.rewards.worker FD``, with the number of a
socket that it shares with the rank. Both send JSON lines (:mod:`paceline.rewards.protocol`).

It ends with the rank. What the functions print goes to the standard error, like the traceback of
an exception that they raise.
"""

import asyncio
import faulthandler
import inspect
import json
import logging
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

from paceline.config.schema.rewards import RewardEntry
from paceline.core.errors import ConfigError
from paceline.core.processes import end_with_parent
from paceline.core.user_code import error_summary
from paceline.rewards.builtin import build_reward
from paceline.rewards.functions import file_of, load_function
from paceline.rewards.protocol import (
    WHERE_SIGNAL,
    GroupRequest,
    RewardProblem,
    RewardReply,
    SetupReply,
    SetupRequest,
)
from paceline.rewards.values import BadRewards, check_values

Reward = Callable[..., object]


def main(fd: int) -> None:
    """Answer requests until the rank closes its end of the socket."""
    end_with_parent()
    os.dup2(2, 1)  # what functions print must not be lost or mix with other output
    # A completion may have characters that cannot be encoded. The stream is a new one, because the
    # earlier one may have been a file, and would seek in it.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):
        # The rank finishes its step when the run is stopped, and ends this process. A handler,
        # unlike SIG_IGN, is not inherited by programs that a function starts.
        signal.signal(number, lambda *_: None)
    faulthandler.register(WHERE_SIGNAL)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as file:
        stream = cast(BinaryIO, file)
        first = stream.readline()
        rewards = _set_up(json.loads(first), stream) if first else None
        while rewards is not None and (line := stream.readline()):
            _answer(line, rewards, stream)


def _set_up(request: SetupRequest, stream: BinaryIO) -> list[Reward] | None:
    """Load the rewards; None if one cannot be loaded."""
    reply, rewards = SetupReply(error=None), []
    try:
        for values in request["rewards"]:
            entry = RewardEntry.model_validate(values)
            if entry.function is not None:
                rewards.append(load_function(entry.function))
                continue
            settings = request["max_completion_length"], request["timeout_s"]
            rewards.append(build_reward(entry, *settings))
    except ConfigError as error:
        reply["error"] = error.record()
    _send(stream, reply)
    return None if reply["error"] else rewards


def _answer(line: bytes, rewards: list[Reward], stream: BinaryIO) -> None:
    """Send the values of each reward, up to the first one that has none."""
    for reward in rewards:
        request: GroupRequest = json.loads(line)  # a function may change what it gets
        count = len(request["completions"])
        reply: RewardReply
        try:
            reply = {"values": check_values(_call(reward, request, count), count)}
        except BadRewards as error:
            reply = {"problem": error.problem}
        except BaseException as error:
            traceback.print_exc()
            reply = {"problem": _raised(error, file_of(reward))}
        _send(stream, reply)
        if "problem" in reply:
            return


def _call(reward: Reward, request: GroupRequest, count: int) -> object:
    # Rewards with random numbers do not depend on the process that computes them.
    random.seed(f"{request['step']} {request['number']}")
    returned = reward(
        **{name: [value] * count for name, value in request["columns"].items()},
        prompts=[request["prompt"]] * count,
        completions=request["completions"],
        completion_ids=request["completion_ids"],
        step=request["step"],
    )
    return _loop().run(_wait(returned)) if inspect.isawaitable(returned) else returned


@cache
def _loop() -> asyncio.Runner:
    """Return the event loop, which connections that a function keeps belong to."""
    return asyncio.Runner()


async def _wait(returned: Awaitable[object]) -> object:
    return await returned


def _raised(error: BaseException, file: str) -> RewardProblem:
    """Describe an exception with the last line of the user's file, or else the last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == Path(file)]
    frame = (own or frames)[-1]
    line = f"{frame.filename}, line {frame.lineno}" + (f": `{frame.line}`" if frame.line else "")
    return {"code": "reward-function-failed", "reason": error_summary(error), "line": line}


def _send(stream: BinaryIO, reply: SetupReply | RewardReply) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))

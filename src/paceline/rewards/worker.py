"""A process that computes rewards: ``python -m paceline.rewards.worker FD``, with the number of a
socket that it shares with the rank. Both send JSON lines (:mod:`paceline.rewards.protocol`).

It ends with the rank. What the functions print goes to the standard error, like the traceback of
an exception that they raise.
"""

import faulthandler
import json
import logging
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from paceline.config.schema.rewards import RewardEntry
from paceline.core.errors import ConfigError
from paceline.core.processes import end_with_parent
from paceline.core.user_code import error_summary
from paceline.rewards.builtin import build_reward
from paceline.rewards.environment_host import EnvironmentHost, awaited, line_of
from paceline.rewards.functions import file_of, load_function
from paceline.rewards.protocol import (
    WHERE_SIGNAL,
    CallReply,
    GroupRequest,
    ResetReply,
    RewardProblem,
    RewardReply,
    SetupReply,
    SetupRequest,
)
from paceline.rewards.values import BadRewards, check_values

Reward = Callable[..., object]
#: The argument `environments` of reward functions; empty without an environment.
Environments = dict[str, list[object]]


@dataclass
class _Loaded:
    """The rewards and the environments of a process. ``host`` is None without an environment."""

    rewards: list[Reward]
    host: EnvironmentHost | None = None


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
        loaded = _set_up(json.loads(first), stream) if first else None
        while loaded is not None and (line := stream.readline()):
            _answer(line, loaded, stream)


def _set_up(request: SetupRequest, stream: BinaryIO) -> _Loaded | None:
    """Load the rewards and the environment; None if one cannot be loaded."""
    reply, loaded = SetupReply(error=None), _Loaded([])
    try:
        for values in request["rewards"]:
            entry = RewardEntry.model_validate(values)
            if entry.function is not None:
                loaded.rewards.append(load_function(entry.function))
                continue
            settings = request["max_completion_length"], request["timeout_s"]
            loaded.rewards.append(build_reward(entry, *settings))
        if request["environment"] is not None:
            max_tokens = request["max_completion_length"]
            loaded.host = EnvironmentHost(request["environment"], max_tokens)
    except ConfigError as error:
        reply["error"] = error.record()
    _send(stream, reply)
    return None if reply["error"] else loaded


def _answer(line: bytes, loaded: _Loaded, stream: BinaryIO) -> None:
    """Send the answer to a request to an environment; or the values of each reward, up to the first
    one that has none."""
    request: Any = json.loads(line)
    if loaded.host is not None and "row" in request:
        _send(stream, loaded.host.reset(request))
    elif loaded.host is not None and "calls" in request:
        _send(stream, loaded.host.call(request))
    else:
        _send_values(line, loaded, stream)


def _send_values(line: bytes, loaded: _Loaded, stream: BinaryIO) -> None:
    session = json.loads(line)["session"]
    environments: Environments = {}
    if loaded.host is not None and session is not None:
        environments = {"environments": loaded.host.take(session)}
    for reward in loaded.rewards:
        request: GroupRequest = json.loads(line)  # a function may change what it gets
        count = len(request["completions"])
        reply: RewardReply
        try:
            returned = _call(reward, request, count, environments)
            reply = {"values": check_values(returned, count)}
        except BadRewards as error:
            reply = {"problem": error.problem}
        except BaseException as error:
            traceback.print_exc()
            reply = {"problem": _raised(error, file_of(reward))}
        _send(stream, reply)
        if "problem" in reply:
            return


def _call(reward: Reward, request: GroupRequest, count: int, environments: Environments) -> object:
    # Rewards with random numbers do not depend on the process that computes them.
    random.seed(f"{request['step']} {request['number']}")
    returned = reward(
        **{name: [value] * count for name, value in request["columns"].items()},
        **environments,
        prompts=request["prompts"],
        completions=request["completions"],
        completion_ids=request["completion_ids"],
        step=request["step"],
    )
    return awaited(returned)


def _raised(error: BaseException, file: str) -> RewardProblem:
    """Describe an exception with the last line of the user's file, or else the last line."""
    line = line_of(error, file)
    return {"code": "reward-function-failed", "reason": error_summary(error), "line": line}


def _send(stream: BinaryIO, reply: SetupReply | RewardReply | ResetReply | CallReply) -> None:
    stream.write(json.dumps(reply).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))

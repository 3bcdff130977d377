"""The environments of the completions of one prompt, which a reward process executes."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from paceline.core.processes import exit_text
from paceline.rewards.failures import (
    describe_environment,
    describe_environment_exit,
    describe_environment_hang,
)
from paceline.rewards.process import RewardProcess
from paceline.rewards.protocol import (
    CallReply,
    CallRequest,
    RequestedCall,
    ResetReply,
    ResetRequest,
    ToolResult,
)

_POLL_S = 1.0


@dataclass
class EnvironmentSession:
    """The environments of a group of completions.

    Args:
        process: the process that executes them. It is used by no one else meanwhile.
        number: number of the session.
        environment: the class, as in the config.
        place: file and row of the prompt, for messages.
        step: optimizer step, for messages.
        timeout_s: seconds that ``reset``, or the calls of a turn of a completion, may take.
        is_first: whether the environments of earlier rollouts are no longer needed.
    """

    process: RewardProcess
    number: int
    environment: str
    place: str
    step: int
    timeout_s: float
    is_first: bool = False

    def reset(self, index: int, seed: str, row: dict[str, JsonValue]) -> str | None:
        """Create and reset the environment of a completion. Return what it adds to the prompt.

        Args:
            index: number of the completion in its group.
            seed: what seeds the random numbers.
            row: arguments of ``reset``.

        Raises:
            RunError: the environment raised, took too long, or ended its process.
        """
        request: ResetRequest = {
            "session": self.number,
            "index": index,
            "seed": seed,
            "row": row,
            "is_first": self.is_first,
        }
        self.is_first = False
        reply: ResetReply = json.loads(self._ask(request, index))
        if "problem" in reply:
            raise describe_environment(
                self.environment, self.place, index, self.step, reply["problem"]
            )
        return reply["observation"]

    def call(self, index: int, seed: str, calls: Sequence[RequestedCall]) -> list[ToolResult]:
        """Execute the tool calls of a turn of a completion and return their results.

        Args:
            index, seed: as for :meth:`reset`.

        Raises:
            RunError: a tool took too long, or ended its process.
        """
        request: CallRequest = {
            "session": self.number,
            "index": index,
            "seed": seed,
            "calls": list(calls),
        }
        reply: CallReply = json.loads(self._ask(request, index))
        if "problem" in reply:
            raise describe_environment(
                self.environment, self.place, index, self.step, reply["problem"]
            )
        return reply["results"]

    def _ask(self, request: ResetRequest | CallRequest, index: int) -> bytes:
        """Return the answer to a request."""
        about = self.environment, self.place, index, self.step
        try:
            self.process.send(request, self.timeout_s)
            return self._answer(self.process.deadline)
        except TimeoutError:
            self.process.show_where()
            raise describe_environment_hang(*about, self.timeout_s) from None
        except EOFError as error:
            raise describe_environment_exit(*about, error) from None

    def _answer(self, deadline: float) -> bytes:
        """Return the next line from the process. Waits in parts: the socket does not tell that the
        process has ended while a process that it has forked holds a copy."""
        while True:
            self.process.deadline = min(deadline, time.monotonic() + _POLL_S)
            try:
                lines = self.process.receive()
            except TimeoutError:
                code = self.process.process.poll()
                if code is not None:
                    raise EOFError(exit_text(code)) from None
                if time.monotonic() >= deadline:
                    raise
                continue
            if lines:
                return lines[0]

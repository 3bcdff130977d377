"""Compute the rewards of completions in several processes."""

import json
import logging
import selectors
import time
from collections.abc import Sequence

import numpy as np

from paceline.config.schema.grpo import Grpo
from paceline.config.schema.rewards import RewardEntry, reward_labels
from paceline.core.errors import RunError
from paceline.core.processes import exit_text
from paceline.core.texts import UserText
from paceline.rewards.environment_session import EnvironmentSession
from paceline.rewards.failures import describe_exit, describe_hang, describe_problem
from paceline.rewards.functions import ARGUMENTS, ENVIRONMENTS
from paceline.rewards.group import CompletionGroup
from paceline.rewards.process import RewardProcess
from paceline.rewards.protocol import GroupRequest, RewardReply

logger = logging.getLogger(__name__)
#: Imports of the user's files may take long.
_START_S = 300.0
_POLL_S = 1.0
#: Columns that the arguments of a reward function replace, as in TRL.
_REPLACED = ("prompt", "completion")


class RewardScorer:
    """Computes rewards in processes that it starts once. Each gets the completions of one prompt at
    a time. Create it in the main thread of a process: the processes end with the thread
    that started them.

    Args:
        rewards: entries of the config. Those with a model are left to
            :class:`~paceline.rewards.reward_model.RewardModel`.
        settings: section ``grpo`` of the config.
        num_workers: number of processes.

    Raises:
        ConfigError: a function cannot be loaded.
        RunError: a process ended or hung while it loaded the functions.
    """

    def __init__(self, rewards: Sequence[RewardEntry], settings: Grpo, num_workers: int) -> None:
        self.rewards, self.settings = list(rewards), settings
        self.labels = reward_labels(self.rewards)
        self._columns = [at for at, entry in enumerate(rewards) if entry.model is None]
        self._processes: list[RewardProcess] = []
        self._sessions: dict[int, RewardProcess] = {}
        self._num_sessions = 0
        self._warned: set[str] = set()
        try:
            is_used = bool(self._columns) or settings.environment is not None
            for _ in range(num_workers if is_used else 0):
                self._processes.append(RewardProcess())
            self._set_up()
        except BaseException:
            self.kill()
            raise

    def _set_up(self) -> None:
        entries = [self.rewards[at] for at in self._columns]
        for process in self._processes:
            process.send(
                {
                    "rewards": [entry.model_dump(mode="json") for entry in entries],
                    "max_completion_length": self.settings.max_completion_length,
                    "timeout_s": self.settings.reward_timeout_s,
                    "environment": self.settings.environment,
                },
                _START_S,
            )
        for process in self._processes:
            try:
                process.finish_setup()
            except TimeoutError:
                process.show_where()
                raise RunError(
                    "the functions of `rewards` were not imported within {limit_s} s",
                    code="reward-import-hangs",
                    fix="move downloads and loading of models out of the file, or into a function",
                    limit_s=f"{_START_S:g}",
                ) from None
            except EOFError as error:
                raise RunError(
                    "the process that imports the functions of `rewards` {exit}",
                    code="reward-import-ended",
                    exit=str(error),
                ) from None

    def open_sessions(self, places: Sequence[str], step: int) -> list[EnvironmentSession]:
        """Return the environments of groups of completions, which are created when they are reset.
        The environments of earlier calls are no longer used.

        Args:
            places: file and row of the prompt of each group, for messages.
            step: optimizer step, for messages.
        """
        assert self.settings.environment is not None
        sessions, self._sessions = [], {}
        for at, place in enumerate(places):
            process = self._processes[at % len(self._processes)]
            self._num_sessions += 1
            self._sessions[self._num_sessions] = process
            sessions.append(
                EnvironmentSession(
                    process,
                    self._num_sessions,
                    self.settings.environment,
                    place,
                    step,
                    self.settings.reward_timeout_s,
                    is_first=at < len(self._processes),
                )
            )
        return sessions

    def score(self, groups: Sequence[CompletionGroup], step: int) -> np.ndarray:
        """Return the rewards, float32 [groups, completions, rewards]; NaN where a function returned
        None, and for reward models.

        Args:
            groups: completions of prompts, as many for each.
            step: optimizer step, for the functions and for messages.

        Raises:
            RunError: a function raised, took too long, ended its process, or returned something
                else than one finite number or None for each completion. The processes have ended.
        """
        num_completions = len(groups[0].completions) if groups else 0
        shape = len(groups), num_completions, len(self.rewards)
        values = np.full(shape, np.nan, dtype=np.float32)
        if not self._columns:
            return values
        try:
            for index, replies in self._compute(groups, step):
                for at, reply in zip(self._columns, replies, strict=True):
                    values[index, :, at] = [np.nan if x is None else x for x in reply["values"]]
        except BaseException:
            self.kill()
            raise
        return values

    def _compute(
        self, groups: Sequence[CompletionGroup], step: int
    ) -> Sequence[tuple[int, list[RewardReply]]]:
        """Return the index of each group with its replies, in the order in which they arrive."""
        waiting = list(range(len(groups)))[::-1]
        done: list[tuple[int, list[RewardReply]]] = []
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.socket, selectors.EVENT_READ, process)
                self._start_next(process, groups, waiting, step)
            while len(done) < len(groups):
                busy = [each for each in self._processes if each.index is not None]
                earliest = min(busy, key=lambda each: each.deadline)
                wait_s = earliest.deadline - time.monotonic()
                events = selector.select(max(0.0, min(wait_s, _POLL_S)))
                if not events:
                    self._check_alive(busy, groups, step)
                if not events and wait_s <= 0:
                    raise self._hang(earliest, groups, step)
                for key, _ in events:
                    process = key.data
                    self._read(process, groups, step)
                    if process.index is not None and len(process.replies) == len(self._columns):
                        done.append((process.index, process.replies))
                        self._start_next(process, groups, waiting, step)
        return done

    def _start_next(
        self,
        process: RewardProcess,
        groups: Sequence[CompletionGroup],
        waiting: list[int],
        step: int,
    ) -> None:
        """Send the next group to an idle process, if there is one."""
        process.index, process.replies = self._take(process, groups, waiting), []
        if process.index is not None:
            try:
                request = self._request(groups[process.index], step)
                process.send(request, self.settings.reward_timeout_s)
            except TimeoutError:
                raise self._hang(process, groups, step) from None

    def _take(
        self, process: RewardProcess, groups: Sequence[CompletionGroup], waiting: list[int]
    ) -> int | None:
        """Remove the next group that a process can score: one whose environments it has, or one
        without environments."""
        for at in reversed(range(len(waiting))):
            session = groups[waiting[at]].session
            if session is None or self._sessions[session] is process:
                return waiting.pop(at)
        return None

    def _read(self, process: RewardProcess, groups: Sequence[CompletionGroup], step: int) -> None:
        """Read the replies that have arrived from a process."""
        try:
            lines = process.receive()
        except EOFError as error:
            raise describe_exit(
                self._entry(process), self._group(process, groups), step, error
            ) from None
        for line in lines:
            reply: RewardReply = json.loads(line)
            if "problem" in reply:
                entry, group = self._entry(process), self._group(process, groups)
                raise describe_problem(entry, group, step, reply["problem"])
            process.replies.append(reply)
            process.deadline = time.monotonic() + self.settings.reward_timeout_s

    def _check_alive(
        self, busy: list[RewardProcess], groups: Sequence[CompletionGroup], step: int
    ) -> None:
        """Raise an error if a process has ended. Its socket does not tell while a process that it
        has forked holds a copy."""
        for process in busy:
            code = process.process.poll()
            if code is not None:
                end = EOFError(exit_text(code))
                raise describe_exit(self._entry(process), self._group(process, groups), step, end)

    def _hang(
        self, process: RewardProcess, groups: Sequence[CompletionGroup], step: int
    ) -> RunError:
        process.show_where()
        limit_s = self.settings.reward_timeout_s
        return describe_hang(self._entry(process), self._group(process, groups), step, limit_s)

    def _entry(self, process: RewardProcess) -> RewardEntry:
        """Return the reward that a process computes."""
        return self.rewards[self._columns[min(len(process.replies), len(self._columns) - 1)]]

    def _group(
        self, process: RewardProcess, groups: Sequence[CompletionGroup]
    ) -> CompletionGroup | None:
        return None if process.index is None else groups[process.index]

    def _request(self, group: CompletionGroup, step: int) -> GroupRequest:
        names = ARGUMENTS if group.session is None else (*ARGUMENTS, ENVIRONMENTS)
        replaced = [name for name in names if name in group.columns]
        for name in replaced:
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    UserText(
                        "reward functions do not get the column `{name}` of the data: an argument"
                        " of this name has another meaning",
                        code="reward-column-replaced",
                        name=name,
                    )
                )
        columns = {
            name: value
            for name, value in group.columns.items()
            if name not in (*replaced, *_REPLACED)
        }
        return {
            "number": group.number,
            "step": step,
            "session": group.session,
            "prompts": group.prompts or [group.prompt] * len(group.completions),
            "completions": group.completions,
            "completion_ids": group.completion_ids,
            "columns": columns,
        }

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def close(self) -> None:
        """End the processes, and wait until they have ended."""
        for process in self._processes:
            process.close()
        self._processes = []

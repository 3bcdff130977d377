"""Environments in the processes that compute rewards: calls, their errors, and what ends a run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.config.schema import Config
from paceline.config.schema.grpo import Grpo, RewardEntry
from paceline.core.errors import ConfigError, RunError
from paceline.rewards.functions import check_reset, environment_notices
from paceline.rewards.group import CompletionGroup
from paceline.rewards.scorer import RewardScorer

SOURCE = '''
import os, random, sys, time

class Env:
    def reset(self, start, **columns):
        self.total, self.prompt = start + random.random(), columns["prompt"]
        return columns.get("says")

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: the number
        """
        self.total += number
        return f"{int(self.total)} {random.random()}"

    async def wait(self) -> str:
        """Wait."""
        return "waited"

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no luck")

    def end(self) -> str:
        """End the process."""
        os._exit(3)

    def leave(self) -> str:
        """Leave."""
        sys.exit(1)

    def sleep(self) -> str:
        """Sleep."""
        time.sleep(60)

    def broken(self) -> str:
        """Return half of a surrogate pair."""
        return "\\ud800"

    def get_reward(self):
        return self.total

    def _secret(self) -> str:
        """Not a tool."""

class NoReset(Env):
    def reset(self, **columns):
        raise RuntimeError("no board")

class Talks(Env):
    def reset(self, **columns):
        return 5

class Strict(Env):
    def reset(self, prompt, start):
        pass

def totals(environments, **columns):
    return [environment.total for environment in environments]
'''
Start = Callable[..., RewardScorer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the processes."""
    file, scorers = tmp_path / "env.py", list[RewardScorer]()
    file.write_text(SOURCE)

    def start_(name: str = "Env", workers: int = 1, timeout_s: float = 30.0) -> RewardScorer:
        settings = Grpo(environment=f"{file}:{name}", reward_timeout_s=timeout_s)
        entries = [RewardEntry(name="environment"), RewardEntry(function=f"{file}:totals")]
        scorers.append(RewardScorer(entries, settings, workers))
        return scorers[-1]

    yield start_
    for scorer in scorers:
        scorer.kill()


def call(name: str, arguments: Any = None) -> Any:
    return {"name": name, "arguments": {} if arguments is None else arguments}


def group(session: int, count: int) -> CompletionGroup:
    return CompletionGroup(
        number=0,
        place="rows.jsonl:1",
        prompt="p",
        completions=["a"] * count,
        completion_ids=[[1]] * count,
        session=session,
    )


def test_each_completion_has_its_own_environment(start: Start) -> None:
    scorer = start(workers=2)
    sessions = scorer.open_sessions(["one", "two", "three"], 1)
    assert sessions[0].process is sessions[2].process is not sessions[1].process
    for number, session in enumerate(sessions):
        for index in range(2):
            row = {"start": number, "prompt": "p", "says": "hi" if index else None}
            assert session.reset(index, f"seed {number}", row) == ("hi" if index else None)
    (first,) = sessions[2].call(1, "seed a", [call("add", {"number": 10})])
    (again,) = sessions[1].call(1, "seed a", [call("add", {"number": 11})])
    assert first["content"] == again["content"]  # the random number depends on the seed only
    assert first["content"].startswith("12 ")
    scores = scorer.score([group(each.number, 2) for each in sessions], 1)
    assert (scores[:, :, 0] == scores[:, :, 1]).all()
    whole = [[int(value) for value in row] for row in scores[:, :, 0]]
    assert whole == [[0, 0], [1, 12], [2, 12]]
    # Completions of a prompt begin with the same random numbers.
    assert scores[0, 0, 0] == scores[0, 1, 0]


def test_errors_of_tools_are_results(start: Start) -> None:
    (session,) = start().open_sessions(["one"], 1)
    session.reset(0, "seed", {"start": 0, "prompt": "p"})
    calls = [
        call("wait"),
        call("fail"),
        call("broken"),
        call("fly"),
        call("reset", {"start": 3}),
        call("get_reward"),
        call("_secret"),
        call("add", {"numbers": 3}),
        call("add", "three"),
        call("__init__"),
    ]
    results = session.call(0, "seed", calls)
    failed = [each["content"] for each in results if each["has_failed"]]
    assert [each["name"] for each in results] == [each["name"] for each in calls]
    assert [each["content"] for each in results if not each["has_failed"]] == ["waited", "?"]
    assert failed[:3] == [
        "{'error': 'no luck'}",
        "{'error': 'Tool fly not found.'}",
        "{'error': 'Tool reset not found.'}",
    ]
    assert "unexpected keyword argument 'numbers'" in failed[5]
    assert len(failed) == 8


def test_rewards_of_environments_that_do_not_count_are_reported(start: Start) -> None:
    text = str(start().settings.environment)
    base = {"model": "m", "dataset": "d", "task": "grpo"}
    for reward, count in (("environment", 0), ("exact", 1)):
        values = {**base, "rewards": [{"name": reward}], "grpo": {"environment": text}}
        notices = environment_notices(Config.model_validate(values))
        codes = [getattr(notice.message, "code", None) for notice in notices]
        assert codes == ["reward-of-environment-unused"] * count


def test_reset_must_accept_the_columns_of_the_data(start: Start) -> None:
    environment = str(start().settings.environment)
    for text, columns in (
        (environment, ["start", "other"]),
        (f"{environment[:-3]}Strict", ["start"]),
    ):
        check_reset(text, columns)
    for text, columns in (
        (environment, ["other"]),
        (f"{environment[:-3]}Strict", ["start", "other"]),
    ):
        with raises_error(ConfigError, code="reset-signature"):
            check_reset(text, columns)


@pytest.mark.parametrize(
    ("name", "tool", "code", "text"),
    [
        ("NoReset", "", "environment-failed", "`reset` raised RuntimeError: no board"),
        ("Talks", "", "not-an-observation", "returned a value of type int"),
        ("Env", "end", "environment-process-ended", "code 3"),
        ("Env", "leave", "environment-failed", "SystemExit: 1"),
        ("Env", "sleep", "environment-hangs", "took more than 1 s"),
    ],
)
def test_environments_that_end_a_run(
    start: Start, name: str, tool: str, code: str, text: str
) -> None:
    (session,) = start(name, timeout_s=1.0).open_sessions(["rows.jsonl:7"], 5)
    with raises_error(RunError, code=code) as caught:
        session.reset(2, "seed", {"start": 0, "prompt": "p"})
        session.call(2, "seed", [call(tool)])
    message = str(caught.value)
    assert text in message
    for part in (f"env.py:{name}", "step 5", "completion 2", "rows.jsonl:7"):
        assert part in message

"""Test the processes that compute rewards: their values, and how a run ends if one fails."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from raised import raises_error

from paceline.config.schema.grpo import Grpo
from paceline.config.schema.rewards import RewardEntry
from paceline.core.errors import ConfigError, RunError
from paceline.core.processes import pid_alive
from paceline.rewards.group import CompletionGroup
from paceline.rewards.scorer import RewardScorer

Start = Callable[..., RewardScorer]
Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """List the child processes that began after the test did; earlier tests leave fork servers."""
    before = {process.pid for process in psutil.Process().children()}
    return lambda: [p for p in psutil.Process().children() if p.pid not in before]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a scorer for the functions of a file, given as its text."""
    scorers = []

    def start_scorer(
        source: str, *names: str, workers: int = 1, timeout_s: float = 30.0
    ) -> RewardScorer:
        file = tmp_path / "own_rewards.py"
        file.write_text(source)
        entries = [
            RewardEntry(function=f"{file}:{name}")
            if name.isidentifier() and f"def {name}" in source
            else RewardEntry(name=name)
            for name in names or ("reward",)
        ]
        scorers.append(RewardScorer(entries, Grpo(reward_timeout_s=timeout_s), workers))
        return scorers[-1]

    yield start_scorer
    for scorer in scorers:
        scorer.close()


def group(number: int = 0, size: int = 2, **columns: object) -> CompletionGroup:
    return CompletionGroup(
        number=number,
        place=f"data.jsonl, row {number + 1}",
        prompt=f"prompt {number}",
        completions=[f"{number}" * (index + 1) for index in range(size)],
        completion_ids=[[5] * (index + 1) for index in range(size)],
        columns=columns,
    )


def test_functions_get_the_arguments_of_trl(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    scorer = start(
        """
def reward(prompts, completions, completion_ids, answer, step, **kwargs):
    assert prompts == ["prompt 3", "prompt 3"], prompts
    assert completions == ["3", "33"]
    assert completion_ids == [[5], [5, 5]]
    assert answer == [{"a": [1, None, "\\u00e9"]}] * 2
    assert kwargs == {"level": [0.5, 0.5]}, kwargs
    return [step + len(text) for text in completions]
"""
    )
    columns = {"answer": {"a": [1, None, "é"]}, "level": 0.5, "prompt": "x", "step": 9}
    rewards = scorer.score([group(3, **columns)], 7)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [[[8.0], [9.0]]]
    scorer.score([group(3, **columns)], 7)
    (record,) = caplog.records  # once
    assert record.msg.code == "reward-column-replaced"
    assert record.msg.values == {"name": "step"}


def test_chats_are_passed_as_messages(start: Start) -> None:
    scorer = start(
        """
def reward(prompts, completions, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "2+2?"}]
    return [completion[0]["content"] == "4" for completion in completions]
""",
        "reward",
        "exact",
    )
    chat = CompletionGroup(
        0,
        "row 1",
        [{"role": "user", "content": "2+2?"}],
        [[{"role": "assistant", "content": text}] for text in ("4", "5\ud800")],
        [[1], [2]],
        {"answer": 4},
    )
    assert scorer.score([chat], 1).tolist() == [[[1.0, 1.0], [0.0, 0.0]]]


def test_groups_are_divided_over_processes_in_order(start: Start) -> None:
    scorer = start(
        """
import os, time
async def reward(completions, level, **kwargs):
    time.sleep(0.02 * (level[0] % 3))
    return [level[0] * 10 + len(text) for text in completions]
def process(completions, **kwargs):
    return [os.getpid()] * len(completions)
""",
        "reward",
        "process",
        workers=2,
    )
    groups = [group(number, size=3, level=number) for number in range(6)]
    rewards = scorer.score(groups, 1)
    assert rewards.shape == (6, 3, 2)
    assert rewards[:, 0, 0].tolist() == [number * 10 + 1 for number in range(6)]
    assert len(set(rewards[:, 0, 1].tolist())) == 2
    # The processes are kept.
    assert set(scorer.score(groups, 2)[:, 0, 1]) == set(rewards[:, 0, 1])
    assert scorer.score([], 3).shape == (0, 0, 2)


def test_numbers_of_all_kinds(start: Start) -> None:
    scorer = start(
        """
from decimal import Decimal
from fractions import Fraction
import numpy as np
def reward(**kwargs):
    return [None, True, np.float32(0.5), np.bool_(False), np.array(3), Fraction(1, 4), -2, 1e30]
def array(**kwargs):
    return np.arange(8)
def pair(**kwargs):
    return (1,) * 8
""",
        "reward",
        "array",
        "pair",
    )
    values = scorer.score([group(size=8)], 1)[0]
    assert math.isnan(values[0, 0])
    assert values[1:, 0].tolist() == [1.0, 0.5, 0.0, 3.0, 0.25, -2.0, float(np.float32(1e30))]
    assert values[:, 1].tolist() == list(range(8))
    assert values[:, 2].tolist() == [1.0] * 8


def test_random_rewards_do_not_depend_on_the_process(start: Start) -> None:
    source = """
import random
def reward(completions, **kwargs):
    return [random.random() for _ in completions]
"""
    groups = [group(number) for number in range(4)]
    one, two = start(source), start(source, workers=2)
    first = one.score(groups, 1)
    assert first.tolist() == two.score(groups[::-1], 1)[::-1].tolist()
    assert first.tolist() != one.score(groups, 2).tolist()
    assert len(np.unique(first)) == first.size


def test_output_of_functions_goes_to_standard_error(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = start(
        """
import os, subprocess, sys
print("imported")
def reward(completions, **kwargs):
    print("printed", "\\ud800", flush=True)
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('by a program')"])
    assert sys.stdin.read() == ""
    return [1] * len(completions)
"""
    )
    assert scorer.score([group()], 1).tolist() == [[[1.0], [1.0]]]
    captured = capfd.readouterr()
    assert captured.out == ""
    for text in ("imported", "printed", "written", "by a program"):
        assert text in captured.err


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ("{}['x']", "reward-function-failed", "KeyError: 'x'"),
        ("raise SystemExit(3)", "reward-function-failed", "SystemExit: 3"),
        ("recurse = lambda: recurse(); recurse()", "reward-function-failed", "RecursionError"),
        ("import os; os._exit(3)", "reward-process-ended", "exit code 3"),
        ("import os; os._exit(0)", "reward-process-ended", "ended without a message"),
        ("import os; os.kill(os.getpid(), 9)", "reward-process-ended", "SIGKILL"),
        ("import os; os.abort()", "reward-process-ended", "SIGABRT"),
        ("return [1.0, float('nan')]", "reward-not-finite", "nan"),
        ("return [1.0, float('-inf')]", "reward-not-finite", "-inf"),
        ("return [1.0, 10 ** 400]", "reward-not-finite", "1000"),
        ("return [1.0, 1e39]", "reward-not-finite", "1e+39"),
        ("return [1.0, '0.5']", "reward-not-a-number", "'0.5' (str)"),
        ("return [1.0, [1.0]]", "reward-not-a-number", "[1.0] (list)"),
        ("return [1.0, 1j]", "reward-not-a-number", "1j"),
        ("return [1.0]", "wrong-number-of-rewards", "1 values"),
        ("return []", "wrong-number-of-rewards", "0 values"),
        ("return 1.0", "rewards-not-a-list", "float"),
        ("return None", "rewards-not-a-list", "NoneType"),
        ("return '01'", "rewards-not-a-list", "str"),
        ("return {'a': 1, 'b': 2}", "rewards-not-a-list", "dict"),
        ("yield 1.0", "rewards-not-a-list", "generator"),
    ],
)
def test_failures_end_the_run(start: Start, body: str, code: str, named: str) -> None:
    scorer = start(f"def reward(completions, **kwargs):\n    {body}\n")
    with raises_error(RunError, code=code, naming=named) as caught:
        scorer.score([group(4)], 12)
    text = str(caught.value)
    assert "own_rewards.py:reward" in text
    assert "step 12" in text
    assert "data.jsonl, row 5" in text
    assert ("own_rewards.py, line 2" in text) is (code == "reward-function-failed")


def test_functions_may_change_their_arguments(start: Start) -> None:
    scorer = start(
        """
def first(completions, completion_ids, level, **kwargs):
    values = [len(text) for text in completions]
    completions.clear()
    completion_ids[0].append(9)
    level[0]["x"] = 5
    return values
def second(completions, completion_ids, level, **kwargs):
    assert level == [{"x": 1}] * 2
    return [len(text) + len(ids) for text, ids in zip(completions, completion_ids, strict=True)]
""",
        "first",
        "second",
    )
    assert scorer.score([group(level={"x": 1})], 1).tolist() == [[[1.0, 2.0], [2.0, 4.0]]]


def test_exit_is_noticed_while_a_forked_process_lives(start: Start) -> None:
    scorer = start(
        """
import os, time
def reward(completions, **kwargs):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(5)
"""
    )
    with raises_error(RunError, code="reward-process-ended", naming="exit code 5"):
        scorer.score([group()], 1)


def test_async_functions_share_an_event_loop(start: Start) -> None:
    scorer = start(
        """
import asyncio
loops = []
async def reward(completions, **kwargs):
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    return [loops[0] is loops[-1]] * len(completions)
class Judge:
    async def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)
judge = Judge()
def later(completions, **kwargs):
    return judge(completions)
""",
        "reward",
        "later",
    )
    for step in (1, 2):
        assert scorer.score([group()], step).tolist() == [[[1.0, 0.5], [1.0, 0.5]]]


def test_failure_of_one_group_names_its_row(start: Start) -> None:
    scorer = start(
        """
def reward(level, completions, **kwargs):
    return [1 / level[0]] * len(completions)
""",
        workers=2,
    )
    groups = [group(number, level=number) for number in (3, 0, 2)]
    with raises_error(RunError, code="reward-function-failed", naming="data.jsonl, row 1:"):
        scorer.score(groups, 1)


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef reward(**kwargs):\n    time.sleep(600)\n",
        # In C, and with signals and exceptions ignored.
        "import re\ndef reward(**kwargs):\n    re.match('(a+)+$', 'a' * 64 + 'b')\n",
        "def reward(**kwargs):\n    while True:\n        try:\n            x = 1\n"
        "        except BaseException:\n            pass\n",
    ],
)
def test_function_that_hangs_is_ended(
    start: Start, source: str, children: Children, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = start(source, timeout_s=0.3)
    with raises_error(RunError, code="reward-hangs", naming="0.3 s at step 2"):
        scorer.score([group()], 2)
    assert "own_rewards.py" in capfd.readouterr().err  # the line that it executed
    assert children() == []


@pytest.mark.soak
def test_programs_of_a_function_end_with_it(start: Start, tmp_path: Path) -> None:
    scorer = start(
        f"""
import subprocess, sys
def reward(**kwargs):
    program = subprocess.Popen(["sleep", "600"])
    open({str(tmp_path / "pid")!r}, "w").write(str(program.pid))
    program.wait()
""",
        timeout_s=1.0,
    )
    with raises_error(RunError, code="reward-hangs"):
        scorer.score([group()], 2)
    pid = int((tmp_path / "pid").read_text())
    assert not pid_alive(pid)


def test_time_limit_is_for_each_reward(start: Start) -> None:
    scorer = start(
        """
import time
def first(completions, **kwargs):
    time.sleep(0.4)
    return [1] * len(completions)
def second(completions, **kwargs):
    time.sleep(0.4)
    return [2] * len(completions)
""",
        "first",
        "second",
        timeout_s=0.7,
    )
    assert scorer.score([group()], 1)[0, 0].tolist() == [1.0, 2.0]


def test_signals_to_the_process_group_do_not_end_it(start: Start, children: Children) -> None:
    scorer = start(
        "import os, signal\ndef reward(completions, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return [1] * len(completions)\n"
    )
    (child,) = children()
    child.send_signal(signal.SIGTERM)
    assert os.getpgid(child.pid) != os.getpgid(0)
    assert scorer.score([group()], 1).tolist() == [[[1.0], [1.0]]]


def test_processes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    file = tmp_path / "slow_rewards.py"
    file.write_text("import time\ndef reward(**kwargs):\n    time.sleep(600)\n")
    program = f"""
import psutil, sys, threading
from paceline.config.schema.grpo import Grpo
from paceline.config.schema.rewards import RewardEntry
from paceline.rewards.group import CompletionGroup
from paceline.rewards.scorer import RewardScorer
scorer = RewardScorer([RewardEntry(function={f"{file}:reward"!r})], Grpo(), 2)
print(*(child.pid for child in psutil.Process().children()), flush=True)
scorer.score([CompletionGroup(0, "row 1", "p", ["c"], [[1]])], 1)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    end = time.monotonic() + 10
    while any(map(pid_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(pid_alive, pids))


def test_processes_inherit_no_files(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        scorer = start(
            "import os\ndef reward(completions, **kwargs):\n"
            "    names = [os.path.realpath(f'/proc/self/fd/{fd}') for fd in range(3, 64)]\n"
            "    return [sum(name.endswith('/lock') for name in names)] * len(completions)\n"
        )
        assert scorer.score([group()], 1).tolist() == [[[0.0], [0.0]]]


@pytest.mark.parametrize(
    ("source", "kind", "code"),
    [
        ("def reward(**kwargs): pass\nraise OSError('no disk')", ConfigError, "user-code-failed"),
        ("def reward(**kwargs): pass\nimport os; os._exit(4)", RunError, "reward-import-ended"),
    ],
)
def test_file_that_cannot_be_imported(
    start: Start, source: str, kind: type[RunError], code: str, children: Children
) -> None:
    with raises_error(kind, code=code):
        start(source, workers=2)
    assert children() == []


def test_rewards_of_models_are_left_out(children: Children) -> None:
    scorer = RewardScorer([RewardEntry(model="./model")], Grpo(), 2)
    assert children() == []
    assert np.isnan(scorer.score([group()], 1)).all()
    mixed = RewardScorer([RewardEntry(model="./model"), RewardEntry(name="exact")], Grpo(), 1)
    rewards = mixed.score([group(4, answer="44")], 1)
    mixed.close()
    assert np.isnan(rewards[0, :, 0]).all()
    assert rewards[0, :, 1].tolist() == [0.0, 1.0]

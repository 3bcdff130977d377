"""An error that would occur again is neither retried nor is its command advised to be repeated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import events, run

from paceline.config.schema import Config
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog
from paceline.distributed.environment import RankEnv
from paceline.launch.restart import RestartPolicy
from paceline.launch.worker import run_guarded

TASK = """
import pathlib
import torch
import paceline


class Breaks(paceline.Task):
    def build_datasets(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(torch.arange(64), x, x.sum(1, keepdim=True)), None

    def build_model(self):
        return torch.nn.Linear(4, 1)

    def loss(self, model, batch):
        numbers, x, y = batch
        if 50 in numbers:
            with open(pathlib.Path(__file__).with_name("raised"), "a") as log:
                log.write("x")
            table = torch.nn.Embedding(4, 1)
            table(torch.tensor([9]))  # as a sample beyond a model's last position
        return torch.nn.functional.mse_loss(model(x), y, reduction="sum")
"""


def outcome_of(error: BaseException) -> dict[str, Any]:
    def fail(job: Any, env: RankEnv, stop: Any) -> dict[str, Any]:
        raise error

    class Job:
        config = Config(model="m", dataset="d")

    return run_guarded(Job(), RankEnv(), None, fail)  # type: ignore[arg-type]


def raised_by(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


WRONG = [
    IndexError("index out of range in self"),
    ValueError("no"),
    TypeError("no"),
    KeyError("x"),
    AttributeError("no"),
    AssertionError(),
    ZeroDivisionError("x"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError(
        "CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously"
        " reported"
    ),
    raised_by(lambda: torch.ones(2, 3) @ torch.ones(2, 3)),
    raised_by(lambda: torch.ones(3) + torch.ones(4)),
    raised_by(lambda: torch.ones(6).view(4)),
    raised_by(lambda: torch.ones(2).double() @ torch.ones(2)),
    raised_by(lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2))),
    raised_by(lambda: torch.nn.functional.cross_entropy(torch.ones(1, 3), torch.tensor([7]))),
    raised_by(
        lambda: torch.nn.Linear(2, 2).load_state_dict(
            {"weight": torch.ones(3, 3), "bias": torch.ones(2)}
        )
    ),
    raised_by(lambda: torch.ones(2).backward()),
    raised_by(lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)])),
]
LINKS = [
    RuntimeError("Connection reset by peer"), RuntimeError("NCCL error in: unhandled system error"),
    RuntimeError("CUDA error: an illegal memory access"),
    torch.distributed.DistBackendError("timed out"),
]  # fmt: skip
UNKNOWN = [
    RuntimeError("something else"),
    OSError("no such file"),
    ConnectionError("the server is gone"),
    EOFError(),
]


@pytest.mark.parametrize("error", WRONG, ids=lambda error: str(error)[:40] or type(error).__name__)
def test_errors_that_would_occur_again(error: BaseException) -> None:
    outcome = outcome_of(error)
    assert (outcome["fault"], outcome["repeats"]) == (False, True)


def test_errors_that_may_not_occur_again() -> None:
    assert [outcome_of(error)["fault"] for error in LINKS] == [True] * len(LINKS)
    assert [outcome_of(error)["fault"] for error in UNKNOWN] == [None] * len(UNKNOWN)
    assert not any(
        outcome_of(error).get("repeats")
        for error in [*LINKS, *UNKNOWN, RunError("explains itself")]
    )


def evaluated(
    folder: Path, outcomes: list[dict[str, Any]], step: int | None
) -> list[tuple[bool, str]]:
    """(whether the ranks are started again, the text) for each outcome of one run, whose log has
    come to ``step``."""
    policy = RestartPolicy(Config(model="m", dataset="d", output_dir=str(folder)), None)
    results = []
    folder.mkdir()
    for outcome in outcomes:
        log = EventLog(folder / "events.jsonl")
        if step is not None:
            log.emit({"type": "step", "step": step})
        log.close()
        fault, reported = policy.evaluate(outcome)
        results.append((fault is not None, reported["text"]))
    return results


def test_what_follows_an_error(tmp_path: Path) -> None:
    advice, again = (
        "run the same command again",
        "Repeating the command would fail in the same way",
    )
    ((retried, text),) = evaluated(tmp_path / "wrong", [outcome_of(WRONG[0])], step=3)
    assert (retried, advice in text, again in text) == (False, False, True)
    first, second = evaluated(tmp_path / "unknown", [outcome_of(UNKNOWN[0])] * 2, step=3)
    assert first[0]
    assert (second[0], advice in second[1], again in second[1]) == (False, False, True)
    ((retried, text),) = evaluated(tmp_path / "early", [outcome_of(UNKNOWN[0])], step=None)
    assert (retried, advice in text, again in text) == (False, False, True)
    assert evaluated(tmp_path / "link", [outcome_of(LINKS[0])], step=3)[0][0]


@pytest.mark.slow
def test_an_index_beyond_a_table_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(TASK)
    args = [
        "model=m",
        "dataset=d",
        f"task={tmp_path / 'breaks.py'}:Breaks",
        "parallel.device=cpu",
        "parallel.num_gpus=1",
        "save_steps=2",
    ]
    error = run(*args, f"output_dir={tmp_path / 'run'}", expect=1).stderr
    assert "IndexError" in error
    assert "Repeating the command would fail in the same way" in error
    assert "run the same command again" not in error
    assert (tmp_path / "raised").read_text() == "x"
    assert events(tmp_path / "run", "fault") == []
    assert (
        json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["status"]
        == "failed"
    )

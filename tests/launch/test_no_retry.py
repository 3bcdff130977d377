"""Test that deterministic errors are not retried, and that their message does not advise to repeat
the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import events, run

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, FaultError, RunError, SaveError
from paceline.core.event_log import EventLog
from paceline.core.failures import ExitRecord, FailureKind, FailureScope
from paceline.distributed.environment import RankEnv
from paceline.launch.ranks.worker import run_guarded
from paceline.launch.restart import RestartPolicy

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
            table(torch.tensor([9]))  # like a sample longer than a model's maximum position
        return torch.nn.functional.mse_loss(model(x), y, reduction="sum")
"""


def fail_with(error: BaseException) -> ExitRecord:
    """Return the record of a rank that raises this error."""

    def fail(job: Any, env: RankEnv, stop: Any) -> ExitRecord:
        raise error

    class Job:
        config = Config(model="m", dataset="d")

    return run_guarded(Job(), RankEnv(), None, fail)  # type: ignore[arg-type]


def catch_error(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


DETERMINISTIC_ERRORS = [
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
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.distributed.DistBackendError(
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"
    ),
    catch_error(lambda: torch.ones(2, 3) @ torch.ones(2, 3)),
    catch_error(lambda: torch.ones(3) + torch.ones(4)),
    catch_error(lambda: torch.ones(6).view(4)),
    catch_error(lambda: torch.ones(2).double() @ torch.ones(2)),
    catch_error(lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.ones(4, 2))),
    catch_error(lambda: torch.nn.functional.cross_entropy(torch.ones(1, 3), torch.tensor([7]))),
    catch_error(
        lambda: torch.nn.Linear(2, 2).load_state_dict(
            {"weight": torch.ones(3, 3), "bias": torch.ones(2)}
        )
    ),
    catch_error(lambda: torch.ones(2).backward()),
    catch_error(lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)])),
]
CONNECTION_ERRORS = [
    RuntimeError("Connection reset by peer"), RuntimeError("NCCL error in: unhandled system error"),
    RuntimeError("CUDA error: an illegal memory access"),
    torch.distributed.DistBackendError("timed out"),
]  # fmt: skip
UNKNOWN_ERRORS = [
    RuntimeError("something else"),
    OSError("no such file"),
    ConnectionError("the server is gone"),
    EOFError(),
]


@pytest.mark.parametrize(
    "error", DETERMINISTIC_ERRORS, ids=lambda error: str(error)[:40] or type(error).__name__
)
def test_deterministic_errors_are_not_faults(error: BaseException) -> None:
    failure = fail_with(error).cause
    is_memory = "alloc" in str(error).lower() or "out of memory" in str(error)
    is_memory = is_memory or isinstance(error, MemoryError)
    assert failure.kind is (FailureKind.MEMORY if is_memory else FailureKind.PROGRAM)
    assert (failure.is_permanent, failure.ranks) == (True, (0,))


def test_connection_and_unknown_errors_may_be_faults() -> None:
    assert [fail_with(error).cause.kind for error in CONNECTION_ERRORS] == [
        FailureKind.CLOSED, FailureKind.FAULT, FailureKind.FAULT, FailureKind.TIMEOUT,
    ]  # fmt: skip
    assert all(fail_with(error).cause.is_transient for error in CONNECTION_ERRORS)
    assert [fail_with(error).cause.kind for error in UNKNOWN_ERRORS] == [FailureKind.UNKNOWN] * len(
        UNKNOWN_ERRORS
    )


def test_own_errors_explain_themselves() -> None:
    assert fail_with(RunError("explains itself")).cause.kind is FailureKind.EXPLAINED
    refused = fail_with(ConfigError("not allowed"))
    assert (refused.cause.kind, refused.exit_code) == (FailureKind.USAGE, 2)
    hang = fail_with(FaultError("ranks 2 and 3 hang: timed out", ranks=[2, 3])).cause
    assert (hang.ranks, hang.scope) == ((2, 3), FailureScope.RUN)
    assert (hang.is_transient, hang.is_consequence) == (True, False)
    assert fail_with(SaveError("rank 1 cannot save")).cause.scope is FailureScope.EVERY_RANK


def evaluate_failures(
    folder: Path, failures: list[ExitRecord], step: int | None
) -> list[tuple[bool, str]]:
    """Return (whether the ranks are restarted, the message) for each failure of a run whose event
    log ends at ``step``."""
    policy = RestartPolicy(Config(model="m", dataset="d", output_dir=str(folder)), None)
    results = []
    folder.mkdir()
    for failed in failures:
        log = EventLog(folder / "events.jsonl")
        if step is not None:
            log.emit({"type": "step", "step": step})
        log.close()
        fault, reported = policy.evaluate(failed)
        results.append((fault is not None, reported.message))
    return results


def test_retry_and_advice_after_error(tmp_path: Path) -> None:
    advice, no_retry = (
        "run the same command again",
        "Repeating the command would fail in the same way",
    )
    ((retried, text),) = evaluate_failures(
        tmp_path / "wrong", [fail_with(DETERMINISTIC_ERRORS[0])], step=3
    )
    assert (retried, advice in text, no_retry in text) == (False, False, True)
    first, second = evaluate_failures(
        tmp_path / "unknown", [fail_with(UNKNOWN_ERRORS[0])] * 2, step=3
    )
    assert first[0]
    assert (second[0], advice in second[1], no_retry in second[1]) == (False, False, True)
    ((retried, text),) = evaluate_failures(
        tmp_path / "early", [fail_with(UNKNOWN_ERRORS[0])], step=None
    )
    assert (retried, advice in text, no_retry in text) == (False, False, True)
    assert evaluate_failures(tmp_path / "link", [fail_with(CONNECTION_ERRORS[0])], step=3)[0][0]


@pytest.mark.slow
def test_index_error_is_not_retried(tmp_path: Path) -> None:
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

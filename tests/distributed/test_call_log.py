"""The last collectives of a rank can be read by other ranks of its host, even after it has died."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch

from paceline.distributed.call_log import CallLog, CallLogReader
from paceline.distributed.timing.progress import CollectiveCall, where

CODE = (lambda: None).__code__


def make_call(number: int | None, numel: int = 3) -> CollectiveCall:
    return CollectiveCall(number, "all_reduce", torch.float32, numel, "0", ((CODE, 7),))


def make_log() -> CallLog:
    log = CallLog.make()
    assert log is not None
    return log


def test_last_calls_are_read_in_order() -> None:
    log = make_log()
    for number in range(40):
        log.write(make_call(number, numel=number % 5))
    log.write(make_call(None))
    calls = CallLogReader(os.getpid(), log.file).calls()
    assert [call["number"] for call in calls] == [*range(9, 40), None]
    assert calls[0] == {
        "number": 9, "function": "all_reduce", "dtype": "float32", "numel": 4, "group": "0",
        "site": [where(CODE, 7)],
    }  # fmt: skip


def test_empty_log_has_no_calls() -> None:
    assert CallLogReader(os.getpid(), make_log().file).calls() == []


def test_missing_log_raises_oserror() -> None:
    with pytest.raises(OSError, match=r"\d"):
        CallLogReader(os.getpid(), 10_000)


def _write_and_wait(pipe: Any) -> None:
    log = make_log()
    log.write(make_call(5))
    pipe.send(log.file)
    pipe.recv()


def test_log_is_readable_after_its_process_was_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe()
    process = context.Process(target=_write_and_wait, args=(sender,))
    process.start()
    assert process.pid is not None
    reader = CallLogReader(process.pid, receiver.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [call["number"] for call in reader.calls()] == [5]

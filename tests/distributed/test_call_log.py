"""The last collectives of a rank can be read by the others of its host, also when it has ended."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch

from paceline.distributed.call_log import CallLog, CallLogReader
from paceline.distributed.progress import CollectiveCall, where

CODE = (lambda: None).__code__


def call(number: int | None, numel: int = 3) -> CollectiveCall:
    return CollectiveCall(number, "all_reduce", torch.float32, numel, "0", ((CODE, 7),))


def make() -> CallLog:
    box = CallLog.make()
    assert box is not None
    return box


def test_the_last_calls_come_back_in_order() -> None:
    box = make()
    for number in range(40):
        box.write(call(number, numel=number % 5))
    box.write(call(None))
    calls = CallLogReader(os.getpid(), box.file).calls()
    assert [call["number"] for call in calls] == [*range(9, 40), None]
    assert calls[0] == {
        "number": 9, "function": "all_reduce", "dtype": "float32", "numel": 4, "group": "0",
        "site": [where(CODE, 7)],
    }  # fmt: skip


def test_an_empty_one() -> None:
    assert CallLogReader(os.getpid(), make().file).calls() == []


def test_one_that_is_not_there() -> None:
    with pytest.raises(OSError, match=r"\d"):
        CallLogReader(os.getpid(), 10_000)


def _write_and_wait(pipe: Any) -> None:
    box = make()
    box.write(call(5))
    pipe.send(box.file)
    pipe.recv()


def test_it_outlives_its_process() -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe()
    process = context.Process(target=_write_and_wait, args=(sender,))
    process.start()
    assert process.pid is not None
    opened = CallLogReader(process.pid, receiver.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [call["number"] for call in opened.calls()] == [5]

"""Which loader processes a rank starts, and that they are never forked from a process that uses an
accelerator."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from loader_dataset import Places, WithModule, WithNumbers, load_places, stack
from test_loader import are_equal, load_steps

from paceline.config.schema.train_args import TrainArgs
from paceline.core.processes import pid_alive
from paceline.data import loader_process
from paceline.data.loader_process import loader_options

SCRIPT = Path(__file__).with_name("loader_dataset.py")


def options_of(*sent, device_type="cuda", num_stream_workers=0, **args):
    return loader_options(TrainArgs(**args), device_type, num_stream_workers, *sent)


def test_processes_of_the_fork_server_do_not_change_batches() -> None:
    assert are_equal(load_steps(), load_steps(workers=2, start_method="forkserver"))


@pytest.mark.parametrize(
    ("device_type", "num_stream_workers", "args", "expected"),
    [
        ("cuda", 0, {}, (1, "forkserver")),
        ("cuda", 0, {"dataloader_num_workers": 3}, (3, "forkserver")),
        ("cuda", 4, {}, (4, "forkserver")),
        ("cuda", 4, {"dataloader_num_workers": 2}, (2, "forkserver")),
        ("cpu", 4, {"dataloader_num_workers": 0}, (4, "fork")),
        ("cpu", 0, {"dataloader_num_workers": 2}, (2, "fork")),
    ],
)
def test_number_of_processes(device_type, num_stream_workers, args, expected) -> None:
    options, notices = options_of(
        Places(), stack, device_type=device_type, num_stream_workers=num_stream_workers, **args
    )
    assert (options.num_workers, options.start_method) == expected
    assert notices == []


@pytest.mark.parametrize(
    ("device_type", "args"), [("cpu", {}), ("cuda", {"dataloader_num_workers": 0})]
)
def test_no_process(device_type, args) -> None:
    options, notices = options_of(Places(), stack, device_type=device_type, **args)
    assert options.num_workers == 0
    assert notices == []


class _Local(Places):
    pass


_Local.__module__ = "__main__"

REASONS = [
    (WithModule, "holds a module (Linear)"),
    (lambda: WithNumbers(300 << 20, as_tensor=False), "more than 256.0 MiB in memory"),
    (lambda: WithNumbers(300 << 20, as_tensor=True), "more than 256.0 MiB in memory"),
    (lambda: torch.empty(2, device="meta"), "holds a tensor on meta"),
    (lambda: [lambda: 0], "cannot be pickled"),
    (_Local, "defined in __main__, which other processes cannot import"),
]


@pytest.mark.parametrize(("make", "reason"), REASONS)
def test_what_cannot_be_copied_is_loaded_by_the_rank_with_a_notice(make, reason) -> None:
    options, [(level, text)] = options_of(make(), stack)
    assert options.num_workers == 0
    assert level == "info"
    assert reason in text


def test_chosen_processes_are_forked_with_a_warning_if_nothing_else_works() -> None:
    options, [(level, text)] = options_of(WithModule(), stack, dataloader_num_workers=2)
    assert (options.num_workers, options.start_method) == (2, "fork")
    assert level == "warning"
    assert "set `dataloader_num_workers: 0`" in text


def test_advice_for_streamed_data_that_cannot_be_copied() -> None:
    options, [(level, text)] = options_of(WithModule(), stack, num_stream_workers=3)
    assert (options.num_workers, options.start_method, level) == (3, "fork", "warning")
    assert "set `streaming: false`" in text  # 0 would mean one process per core


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_process, "_MIN_SHARED_BYTES", 1 << 60)
    options, [(_, text)] = options_of(Places(), stack)
    assert options.num_workers == 0
    assert "--shm-size" in text
    # Processes that the user or the data require are started as usual.
    options, notices = options_of(Places(), stack, dataloader_num_workers=2)
    assert (options.num_workers, options.start_method) == (2, "forkserver")
    assert notices == []


def test_process_has_the_environment_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fork server of this process may run already, without the variable.
    assert are_equal(load_steps(), load_steps(workers=1, start_method="forkserver"))
    monkeypatch.setenv("LOADER_TEST_RANK", "3")
    assert {int(row[3]) for batch in load_places() for row in batch} == {3}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_process_ends_with_its_rank_and_is_not_its_child(number: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPT)]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    try:
        loader, parent = map(int, rank.stdout.readline().split())
        assert len({loader, parent, rank.pid}) == 3
        rank.send_signal(number)
        rank.wait(timeout=30)
        deadline = time.monotonic() + 30
        while pid_alive(loader) or pid_alive(parent):
            assert time.monotonic() < deadline, "the loader process outlives its rank"
            time.sleep(0.05)
    finally:
        rank.kill()
        rank.communicate()


def test_signal_to_the_process_group_does_not_end_a_process() -> None:
    command = [sys.executable, str(SCRIPT)]
    rank = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert rank.stdout is not None
    try:
        loader, parent = map(int, rank.stdout.readline().split())
        os.kill(loader, signal.SIGTERM)
        os.kill(loader, signal.SIGINT)
        os.kill(parent, signal.SIGTERM)
        time.sleep(0.3)
        assert pid_alive(loader)
        assert pid_alive(parent)
    finally:
        rank.kill()
        rank.communicate()

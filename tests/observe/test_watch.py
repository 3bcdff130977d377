"""`paceline watch`: replay, follow, and what it says of runs that died or are not there."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog
from paceline.core.processes import run_alive
from paceline.core.run_dir import RunDir
from paceline.observe.watch import watch


def begin(root: Path, **extra: object) -> EventLog:
    root.mkdir(parents=True, exist_ok=True)
    log = EventLog(RunDir(root).events)
    fields = {
        "derived": {"steps": 1000, "global_batch_size": 4},
        "world_size": 1,
        "device": "cpu",
        "strategy": "single",
        "config": {"task": "sft", "resume": "auto"},
        "output_dir": str(root),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    log.emit({"type": "run_start", **fields, **extra})
    return log


def steps(log: EventLog, first: int, last: int) -> None:
    for number in range(first, last + 1):
        log.emit(
            {
                "type": "step",
                "step": number,
                "epoch": 1.0,
                "loss": float("nan") if number == 2 else 2.0,
                "learning_rate": 1e-3,
                "tokens": 10,
                "step_time_s": 0.1,
            }
        )


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_run_that_is_done_is_replayed_to_its_end(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 3)
    log.emit({"type": "run_end", "status": "done", "step": 3, "reason": None})
    log.close()
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 0
    text = stream.getvalue()
    assert "single, 1 rank, cpu" in text
    assert "step 1/1,000" in text
    assert "step 3/1,000" in text
    assert "done" in text


def test_a_failed_run_gives_exit_code_1_and_its_reason(tmp_path):
    log = begin(tmp_path)
    log.emit(
        {"type": "run_end", "status": "failed", "step": None, "reason": "rank 1: out of memory"}
    )
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 1
    assert "rank 1: out of memory" in stream.getvalue()


def test_nan_in_the_file_is_shown(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 2)
    log.emit({"type": "run_end", "status": "stopped", "step": 2, "reason": "signal 2"})
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 0
    assert "loss nan" in stream.getvalue()


def test_what_happens_later_is_followed_over_a_resume(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 1)
    stream = io.StringIO()
    codes: list[int] = []
    watcher = threading.Thread(target=lambda: codes.append(watch(tmp_path, stream)))
    watcher.start()
    deadline = time.monotonic() + 20
    while "step 1/1,000" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    log.close()
    log = begin(tmp_path, resumed_from_step=1)
    log.emit({"type": "resume", "step": 1, "path": "checkpoints/step-00000001"})
    steps(log, 5, 5)
    log.emit({"type": "run_end", "status": "done", "step": 5, "reason": None})
    watcher.join(20)
    assert codes == [0]
    text = stream.getvalue()
    order = [
        text.index(part)
        for part in (
            "step 1/1,000",
            "resumed at step 1 from checkpoints/step-00000001",
            "step 5/1,000",
        )
    ]
    assert order == sorted(order)


def test_once_shows_the_current_state_and_returns(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 1)
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 0
    assert "step 1/1,000" in stream.getvalue()


def test_a_long_history_is_thinned_with_a_note(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 900)
    stream = io.StringIO()
    watch(tmp_path, stream, once=True)
    text = stream.getvalue()
    assert "showing about one in 23 of 900 past steps" in text
    assert len(re.findall(r"^step ", text, re.MULTILINE)) <= 42
    assert "step 900/1,000" in text


def test_a_run_whose_process_has_ended_is_reported_with_a_resume_hint(tmp_path):
    log = begin(tmp_path, pid=ended_process())
    steps(log, 1, 2)
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 1
    text = stream.getvalue()
    assert "The run died" in text
    assert "run the same command again" in text
    assert f"paceline train {tmp_path}/config.yaml" in text


def test_run_alive_knows_what_it_cannot_know():
    this_host = {"host": socket.gethostname(), "time": time.time()}
    assert run_alive({**this_host, "pid": os.getpid()}) is True
    assert run_alive({**this_host, "pid": ended_process()}) is False
    assert run_alive({**this_host, "pid": os.getpid(), "host": "elsewhere"}) is None
    assert run_alive({}) is None


def test_a_reused_pid_is_not_the_run():
    long_ago = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time() - 10 * 365 * 86400,
    }
    known = Path("/proc/stat").exists()  # elsewhere only the number is known
    assert run_alive(long_ago) is not known


def test_no_run_names_the_runs_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "output" / "qwen-lora").close()
    begin(tmp_path / "output" / "digits").close()
    with pytest.raises(ConfigError) as caught:
        watch(Path("output/qwen-lor"))
    assert "`output/qwen-lor` not found" in str(caught.value)
    assert "`paceline watch output/qwen-lora`" in str(caught.value)
    assert "output/digits" in str(caught.value)


def test_no_run_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="`nothing` not found"):
        watch(Path("nothing"))


def test_a_watcher_that_nobody_reads_ends(tmp_path):
    begin(tmp_path).close()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        with pytest.raises(BrokenPipeError):
            watch(tmp_path, stream)
        # what could not be written need not be
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_a_file_inside_the_run_will_do(tmp_path):
    begin(tmp_path).close()
    stream = io.StringIO()
    assert watch(tmp_path / "events.jsonl", stream, once=True) == 0


def test_a_run_without_an_event_yet(tmp_path):
    RunDir(tmp_path).config.write_text("model: m\n")
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 0
    assert "no events yet" in stream.getvalue()


def test_ctrl_c_leaves_and_starting_imports_nothing_heavy(tmp_path):
    log = begin(tmp_path)
    steps(log, 1, 1)
    before = RunDir(tmp_path).events.read_bytes()
    code = (
        "import sys; from pathlib import Path; from paceline.observe.watch import watch; code ="
        " watch(Path(sys.argv[1]));assert not {'torch', 'transformers', 'pydantic', 'numpy'} &"
        " set(sys.modules); sys.exit(code)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    read = ""
    while "step 1/1,000" not in read:
        line = child.stderr.readline()
        assert line, read
        read += line
    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=20)
    assert child.returncode == 0, rest
    assert "the run continues" in rest
    assert RunDir(tmp_path).events.read_bytes() == before

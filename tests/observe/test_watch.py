"""`paceline watch`: replaying and following runs, and messages for dead and missing runs."""

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
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.core.event_log import EventLog
from paceline.core.processes import run_alive
from paceline.core.run_dir import RunDir
from paceline.observe.watch import watch


def start_log(root: Path, **extra: object) -> EventLog:
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


def log_steps(log: EventLog, first: int, last: int) -> None:
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


def get_pid_of_ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_finished_run_is_replayed_to_end(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 3)
    log.emit({"type": "run_end", "status": "done", "step": 3, "reason": None})
    log.close()
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 0
    text = stream.getvalue()
    assert "single, 1 rank, cpu" in text
    assert "step 1/1,000" in text
    assert "step 3/1,000" in text
    assert "done" in text


def test_failed_run_exits_with_1_and_shows_reason(tmp_path):
    log = start_log(tmp_path)
    log.emit(
        {"type": "run_end", "status": "failed", "step": None, "reason": "rank 1: out of memory"}
    )
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 1
    assert "rank 1: out of memory" in stream.getvalue()


def test_nan_loss_is_shown(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 2)
    log.emit({"type": "run_end", "status": "stopped", "step": 2, "reason": "signal 2"})
    stream = io.StringIO()
    assert watch(tmp_path, stream) == 0
    assert "loss nan" in stream.getvalue()


def test_new_events_are_followed_across_resume(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 1)
    stream = io.StringIO()
    codes: list[int] = []
    watcher = threading.Thread(target=lambda: codes.append(watch(tmp_path, stream)))
    watcher.start()
    deadline = time.monotonic() + 20
    while "step 1/1,000" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    log.close()
    log = start_log(tmp_path, resumed_from_step=1)
    log.emit({"type": "resume", "step": 1, "path": "checkpoints/step-00000001"})
    log_steps(log, 5, 5)
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


def test_once_shows_current_state_and_returns(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 1)
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 0
    assert "step 1/1,000" in stream.getvalue()


def test_long_history_is_downsampled_with_note(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 900)
    stream = io.StringIO()
    watch(tmp_path, stream, once=True)
    text = stream.getvalue()
    assert "showing about one in 23 of 900 past steps" in text
    assert len(re.findall(r"^step ", text, re.MULTILINE)) <= 42
    assert "step 900/1,000" in text


def test_dead_run_is_reported_with_resume_hint(tmp_path):
    log = start_log(tmp_path, pid=get_pid_of_ended_process())
    log_steps(log, 1, 2)
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 1
    text = stream.getvalue()
    assert "The run died" in text
    assert "run the same command again" in text
    assert f"paceline sft {tmp_path}/config.yaml" in text


def test_run_alive_returns_none_for_other_hosts():
    this_host = {"host": socket.gethostname(), "time": time.time()}
    assert run_alive({**this_host, "pid": os.getpid()}) is True
    assert run_alive({**this_host, "pid": get_pid_of_ended_process()}) is False
    assert run_alive({**this_host, "pid": os.getpid(), "host": "other-host"}) is None
    assert run_alive({}) is None


def test_reused_pid_is_not_the_run():
    event_before_boot = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time() - 10 * 365 * 86400,
    }
    knows_boot_time = Path("/proc/stat").exists()  # on other systems, only the pid is checked
    assert run_alive(event_before_boot) is not knows_boot_time


def test_missing_run_error_lists_existing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start_log(tmp_path / "output" / "qwen-lora").close()
    start_log(tmp_path / "output" / "digits").close()
    with pytest.raises(ConfigError) as caught:
        watch(Path("output/qwen-lor"))
    assert "`output/qwen-lor` not found" in str(caught.value)
    assert "`paceline watch output/qwen-lora`" in str(caught.value)
    assert "output/digits" in str(caught.value)


def test_missing_run_error_without_other_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_error(ConfigError, code="no-run-to-watch", naming="nothing"):
        watch(Path("nothing"))


def test_watch_ends_on_broken_pipe(tmp_path):
    start_log(tmp_path).close()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        with pytest.raises(BrokenPipeError):
            watch(tmp_path, stream)
        # Closing the stream writes its remaining buffer, so redirect it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_accepts_file_inside_run_folder(tmp_path):
    start_log(tmp_path).close()
    stream = io.StringIO()
    assert watch(tmp_path / "events.jsonl", stream, once=True) == 0


def test_run_without_events(tmp_path):
    RunDir(tmp_path).config.write_text("model: m\n")
    stream = io.StringIO()
    assert watch(tmp_path, stream, once=True) == 0
    assert "no events yet" in stream.getvalue()


def test_ctrl_c_ends_watch_and_heavy_modules_are_not_imported(tmp_path):
    log = start_log(tmp_path)
    log_steps(log, 1, 1)
    content_before = RunDir(tmp_path).events.read_bytes()
    code = (
        "import sys; from pathlib import Path; from paceline.observe.watch import watch; code ="
        " watch(Path(sys.argv[1]));assert not {'torch', 'transformers', 'pydantic', 'numpy'} &"
        " set(sys.modules); sys.exit(code)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    output = ""
    while "step 1/1,000" not in output:
        line = child.stderr.readline()
        assert line, output
        output += line
    child.send_signal(signal.SIGINT)
    _, remaining_output = child.communicate(timeout=20)
    assert child.returncode == 0, remaining_output
    assert "the run continues" in remaining_output
    assert RunDir(tmp_path).events.read_bytes() == content_before

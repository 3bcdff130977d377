"""The console: output to a pipe, the live display on a terminal, and errors that must not affect
the run."""

import io
import math
import os
import re
import select
import subprocess
import sys

import pytest

from paceline.core.event_log import EventLog
from paceline.observe.console import Console

START = {
    "config": {"task": "sft", "resume": "auto"},
    "derived": {
        "world_size": 2,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "global_batch_size": 16,
        "steps_per_epoch": 20,
        "steps": 40,
        "epochs": 2.0,
        "warmup_steps": 5,
        "learning_rate": 1e-4,
        "tokens_per_step": 3200,
        "eval_every_steps": 20,
    },
    "world_size": 2,
    "device": "cpu",
    "strategy": "ddp",
    "model": {"name": "builtin:small", "parameters": 3_000_000, "trainable_parameters": 120_000},
    "data": {"read": 90, "kept": 85, "truncated": 4, "dropped": {"empty": 3, "too long": 2}},
    "versions": {"torch": "2.11"},
    "output_dir": "output/run",
    "resumed_from_step": None,
}


def make_step_event(
    number: int, loss: object = 1.5, at: float | None = None, **fields: object
) -> dict:
    """Return a `step` event, 0.1 s after the previous one."""
    return {
        "time": 1000.0 + number * 0.1 if at is None else at,
        "type": "step",
        "step": number,
        "epoch": number / 20,
        "loss": loss,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "tokens": 3200,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "comm_wait_s": None,
        "memory_bytes": [2**30, 3 * 2**29],
        "ranks": None,
        **fields,
    }


def make_start_event(**fields: object) -> dict:
    return {"time": 1000.0, "type": "run_start", **START, **fields}


def print_to_pipe(events: list[dict]) -> str:
    stream = io.StringIO()
    console = Console(stream)
    for event in events:
        console(event)
    console.close()
    return stream.getvalue()


def test_start_block_shows_model_parallelism_data_and_derived_values():
    text = print_to_pipe([make_start_event()])
    for part in (
        "builtin:small: 3,000,000 parameters, 120,000 trained (4 %)",
        "ddp, 2 ranks, cpu",
        "90 read, 85 kept, 4 truncated, 5 dropped (3 empty, 2 too long)",
        "16 samples = 4 per micro-batch × 2 accumulation × 2 ranks",
        "about 3,200 tokens per step",
        "40 (20 per epoch, 2 epochs)",
        "1e-4, after 5 steps of warm-up",
        "paceline watch output/run",
    ):
        assert part in text


def test_step_line_has_metrics_and_no_control_codes():
    line = print_to_pipe([make_start_event(), make_step_event(1)]).splitlines()[-1]
    assert (
        line
        == "step 1/40  epoch 0.05  loss 1.5000  lr 1e-4  6.4k tokens/s  mem 1.5 GiB  2 ranks  ETA"
        " 0:20"
    )


def printed_steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


@pytest.mark.soak
def test_long_run_prints_about_one_line_per_second():
    long_run = make_start_event(derived={**START["derived"], "steps": 140})
    steps = printed_steps(
        print_to_pipe([long_run, *(make_step_event(number) for number in range(1, 141))])
    )
    assert steps[0] == 1
    assert steps[-1] == 140
    assert 15 <= len(steps) <= 17  # 14 seconds


@pytest.mark.soak
def test_short_run_prints_every_logged_step():
    assert printed_steps(
        print_to_pipe([make_start_event(), *(make_step_event(number) for number in range(1, 41))])
    ) == list(range(1, 41))


@pytest.mark.soak
def test_every_step_of_logging_steps_is_printed():
    settings = {
        "derived": {**START["derived"], "steps": 1000},
        "config": {"train_args": {"logging_steps": 5}},
    }
    logged = [1, *range(5, 201, 5)]
    assert (
        printed_steps(
            print_to_pipe(
                [make_start_event(**settings), *(make_step_event(number) for number in logged)]
            )
        )
        == logged
    )


@pytest.mark.soak
def test_stopped_run_shows_last_step():
    text = print_to_pipe(
        [
            make_start_event(),
            make_step_event(1),
            make_step_event(2),
            make_step_event(3),
            {"type": "run_end", "time": 1001.0, "status": "stopped", "step": 3, "wall_s": 1.0},
        ]
    )
    assert "step 3/40" in text
    assert "stopped" in text
    assert "3 of 40 steps in 1.0 s" in text
    assert "run the same command again" in text


@pytest.mark.soak
def test_evaluations_checkpoints_and_notices_are_always_printed():
    events = []
    for number in range(1, 11):
        events += [
            make_step_event(number),
            {
                "type": "eval",
                "time": 1000.0,
                "step": number,
                "loss": 1.25,
                "count": 99,
                "wall_s": 0.1,
                "metrics": {"accuracy": 0.5},
            },
            {
                "type": "checkpoint",
                "time": 1000.0,
                "step": number,
                "path": "c",
                "size_bytes": 2048,
                "wall_s": 0.1,
            },
            {"type": "notice", "time": 1000.0, "level": "warning", "text": f"example {number}"},
        ]
    text = print_to_pipe([make_start_event(), *events])
    assert (
        text.count("evaluation at step")
        == text.count("checkpoint at step")
        == text.count("warning: example")
        == 10
    )
    assert "loss 1.2500, accuracy 0.5000, over 99 targets, in 0.10 s" in text
    assert "2.0 KiB" in text


def test_failed_checkpoint_is_a_warning():
    text = print_to_pipe(
        [
            {
                "type": "checkpoint",
                "time": 0.0,
                "step": 8,
                "path": None,
                "size_bytes": None,
                "wall_s": None,
                "error": "disk full",
            }
        ]
    )
    assert text == "warning: no checkpoint at step 8: disk full\n"


def test_end_block_shows_files_and_next_commands():
    text = print_to_pipe(
        [
            make_start_event(),
            make_step_event(1, 3.0),
            make_step_event(40, 1.0),
            {"type": "run_end", "time": 1065.0, "status": "done", "step": 40, "wall_s": 65.0},
        ]
    )
    assert "training loss 3.0000 → 1.0000" in text
    for part in (
        "1 min 05 s",
        "output/run/report.html",
        "output/run/model/",
        'paceline generate output/run "…"',
        "paceline watch output/run",
    ):
        assert part in text


def test_generate_is_suggested_only_for_language_models():
    end = {"type": "run_end", "time": 1.0, "status": "done", "step": 40}
    assert "generate" not in print_to_pipe([make_start_event(config={"task": "classify"}), end])


def test_failed_run_shows_reason():
    text = print_to_pipe(
        [
            make_start_event(),
            {
                "type": "run_end",
                "time": 1.0,
                "status": "failed",
                "step": None,
                "reason": "rank 1 died",
            },
        ]
    )
    assert "rank 1 died" in text


@pytest.mark.parametrize("loss", ["nan", math.nan, math.inf, None])
def test_loss_that_is_not_a_number(loss):
    assert f"loss {'–' if loss is None else str(float(loss))}" in print_to_pipe(
        [make_start_event(), make_step_event(1, loss)]
    )


def test_unknown_metrics_are_omitted():
    event = {"time": 1.0, "type": "step", "step": 1, "loss": 2.0}
    minimal_start_event = {
        "time": 1.0,
        "type": "run_start",
        "strategy": "single",
        "device": "cpu",
        "world_size": 1,
    }
    assert (
        print_to_pipe([minimal_start_event, event]).splitlines()[-1]
        == "step 1  loss 2.0000  1 rank"
    )


def test_samples_per_second_without_tokens():
    assert "32 samples/s" in print_to_pipe([make_start_event(), make_step_event(1, tokens=None)])


def test_eta_uses_median_step_time():
    text = print_to_pipe(
        [
            make_start_event(),
            make_step_event(1),
            make_step_event(2),
            make_step_event(3, step_time_s=500.0, at=1005.0),
        ]
    )
    # 37 steps of 0.5 s, although step 3 took 500 s
    assert text.splitlines()[-1].endswith("ETA 0:18")


def test_time_to_first_step_is_printed_once_per_attempt():
    lines = print_to_pipe(
        [
            make_start_event(),
            make_step_event(1, since_start_s=4.21),
            make_step_event(2),
            make_start_event(resumed_from_step=2),
            make_step_event(3, since_start_s=3.0),
        ]
    )
    assert lines.count("first step after") == 2
    assert "first step after 4.2 s" in lines


def test_control_characters_are_removed():
    text = print_to_pipe(
        [
            make_start_event(output_dir="a\x1b[2Jb"),
            {"type": "notice", "time": 0.0, "level": "info", "text": "x\x1b]0;y\x07"},
        ]
    )
    assert "\x1b" not in text
    assert "\x07" not in text


def test_json_mode_does_not_write_to_stdout(capsys):
    Console(sys.stdout, json_mode=True)(make_step_event(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1" in captured.err


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_broken_pipe_does_not_affect_run(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", [Console(BrokenStream())])
    log.emit({"type": "run_start", **START})
    log.emit({"type": "run_end", "status": "done", "step": 0})
    log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_closed_stream_is_ignored():
    stream = io.StringIO()
    console = Console(stream)
    stream.close()
    console(make_start_event())
    console.close()


def test_ascii_stream_receives_only_ascii():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"))
    console(make_start_event())
    assert b"4 per micro-batch x 2 accumulation x 2 ranks" in raw.getvalue()


def test_malformed_event_does_not_raise():
    assert "cannot show a step event" in print_to_pipe(
        [{"type": "step", "time": 0.0}, {"type": "run_start", "derived": 7}]
    )
    assert print_to_pipe([{"type": "future_event_type", "time": 0.0}]) == ""


# Terminal tests: a child process whose standard error is a pseudo-terminal.

CHILD_SCRIPT = """
import json, sys, time
from paceline.observe.console import Console
console = Console()
for line in sys.stdin:
    console(json.loads(line))
    time.sleep(0.11)  # so that each event is drawn
console.close()
assert "rich.live" in sys.modules and "torch" not in sys.modules
"""


def run_on_terminal(events: list[dict], columns: int, **environment: str) -> str:
    import fcntl
    import json
    import struct
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD_SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**env, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
    )
    os.close(slave)
    child.stdin.write("".join(json.dumps(event) + "\n" for event in events).encode())
    child.stdin.close()
    output = b""
    while select.select([master], [], [], 30)[0]:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    with child:
        assert child.stdout.read() == b""
    assert child.returncode == 0, output.decode()
    return output.decode()


def render_screen(raw: str) -> list[str]:
    """Return the final lines of the screen: carriage return and erase-line are applied, and colors
    removed."""
    lines = []
    for line in re.sub(r"\x1b\[(?![0-9]*K)[0-9;?]*[a-zA-Z]", "", raw).split("\n"):
        visible = re.split(r"\r?\x1b\[2K", line.rstrip("\r"))[-1]
        lines.append(visible.split("\r")[-1].rstrip())
    return [line for line in lines if line]


def test_terminal_shows_step_lines_above_one_live_line():
    raw = run_on_terminal(
        [
            make_start_event(),
            make_step_event(1, since_start_s=4.0),
            make_step_event(2),
            {"type": "notice", "time": 0.0, "level": "info", "text": "[bold]hello[/bold]"},
            make_step_event(9, at=1005.0),
            make_step_event(20, at=1005.5),
            {"type": "run_end", "time": 1006.0, "status": "done", "step": 20},
        ],
        columns=140,
    )
    assert "\x1b[2K" in raw  # redrawn in place
    assert raw.count("\x1b[?25h") >= 1
    assert raw.rfind("\x1b[?25h") > raw.rfind("\x1b[?25l")  # the cursor is visible at the end
    lines = render_screen(raw)
    live = [line for line in lines if "step 20/40" in line]
    assert len(live) == 1  # no line of its own
    assert live[0].startswith("━━━")
    assert "loss 1.5000" in live[0]
    assert "6.4k tokens/s" in live[0]
    assert "ETA 0:10" in live[0]
    steps = [line.split("  ")[0] for line in lines if line.startswith("step ")]
    assert steps == ["step 1/40", "step 9/40"]  # at most one line a second
    notice_index = next(index for index, line in enumerate(lines) if line == "[bold]hello[/bold]")
    assert notice_index < lines.index(live[0])
    assert any(line.startswith("done") for line in lines)


def test_narrow_terminal_shows_step_loss_and_eta_on_one_line():
    raw = run_on_terminal([make_start_event(), make_step_event(7)], columns=44)
    line = render_screen(raw)[-1]
    assert len(line) < 44
    assert "step 7/40" in line
    assert "loss 1.5000" in line
    assert "ETA" in line
    assert "ranks" not in line


def test_dumb_terminal_receives_plain_lines(monkeypatch):
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "dumb")
    with os.fdopen(slave, "w") as stream:
        console = Console(stream)
        console(make_start_event())
        console(make_step_event(1))
        assert not console.live
        output = b""
        while b"step 1/40" not in output:
            output += os.read(master, 65536)
    os.close(master)
    assert b"\x1b" not in output


def test_closing_terminal_does_not_stop_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    stream = os.fdopen(slave, "w")
    console = Console(stream)
    assert console.live
    log = EventLog(tmp_path / "events.jsonl", [console])
    log.emit({"type": "run_start", **START})
    log.emit(make_step_event(1))
    os.close(master)
    for number in (2, 3):
        log.emit(make_step_event(number))
    log.emit({"type": "run_end", "status": "done", "step": 3})
    log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 5

"""Test the slow-network benchmark: its arguments, the summary of a run's events, and hosts in
network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS, import_benchmark

SCRIPT = BENCHMARKS / "slow_network.py"
netns = import_benchmark("netns")
report = import_benchmark("slow_network_report")
slow_network = import_benchmark("slow_network")


def run_script(*arguments, **env):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=500
    )


# -- arguments


@pytest.mark.soak
def test_parses_rates_delays_and_losses_in_the_format_of_tc():
    assert netns.parse_rate("100mbit") == 1e8
    assert netns.parse_rate("1.5gbit") == 1.5e9
    assert netns.parse_rate("800kbit") == 8e5
    assert netns.parse_delay("10ms") == pytest.approx(0.01)
    assert netns.parse_delay("500us") == pytest.approx(0.0005)
    assert netns.parse_delay("0") == 0.0
    assert netns.parse_loss("0.5%") == netns.parse_loss("0.5") == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "fast"), "'fast': expected a rate such as 100mbit"),
        (("--rate", "100"), "'100': expected a rate"),
        (("--rate", "0mbit"), "'0mbit': expected a rate"),
        (("--delay", "10"), "'10': expected a time such as 10ms"),
        (("--loss", "60"), "'60': expected a percentage"),
        (("--loss", "-1"), "expected a percentage"),
        (("--hosts", "1"), "--hosts 1: expected an integer between 2 and 16"),
        (("--methods", "ddp,zip"), "unknown methods: zip. Choose from: ddp, bf16"),
        (("--steps", "15"), "expected a multiple of --evaluate-every 10"),
        (("--extra", "-1"), "--extra must be at least 0"),
        (("--set", "learning_rate"), "expected KEY=VALUE"),
        (("--set", "zip:compression.ratio=1"), "or METHOD:KEY=VALUE"),
    ],
)
def test_rejects_invalid_arguments(arguments, message, capsys):
    key, value = arguments
    with pytest.raises(SystemExit) as exit_info:
        slow_network.read_arguments([f"{key}={value}"])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_reports_missing_iproute2():
    completed = run_script(PATH="/nonexistent")
    assert completed.returncode == 2
    assert "ip and tc not found. To fix: install iproute2" in completed.stderr


def test_reports_missing_root(monkeypatch):
    monkeypatch.setattr(netns.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(netns.NetworkError, match=r"creating network namespaces needs root.*sudo"):
        netns.check_machine()


def test_methods_differ_from_ddp_only_in_their_settings():
    args = slow_network.read_arguments(["--methods", ",".join(slow_network.METHODS)])
    baseline = slow_network.method_settings("ddp", 200, args)
    for name, (changed, _) in slow_network.METHODS.items():
        settings = slow_network.method_settings(name, 200, args)
        assert {key for key in settings if settings[key] != baseline.get(key)} <= set(changed)
    assert args.methods[0] == "ddp"


def test_set_applies_to_all_methods_or_to_one():
    arguments = ["--set", "train_args.seed=7", "--set", "topk:compression.ratio=0.02"]
    args = slow_network.read_arguments(arguments)
    changed = {name: slow_network.method_settings(name, 200, args) for name in ("ddp", "topk")}
    assert [settings["train_args.seed"] for settings in changed.values()] == ["7", "7"]
    assert changed["topk"]["compression.ratio"] == "0.02"
    assert "compression.ratio" not in changed["ddp"]


# -- summary


def test_first_crossing_interpolates_between_evaluations():
    points = [(10.0, 6.0), (20.0, 5.0), (30.0, 5.5), (40.0, 4.5)]
    assert report.first_crossing(points, 5.25) == pytest.approx(17.5)
    assert report.first_crossing(points, 5.0) == 20.0
    assert report.first_crossing(points, 4.75) == pytest.approx(37.5)
    assert report.first_crossing(points, 6.5) == 10.0
    assert report.first_crossing(points, 4.0) is None
    assert report.first_crossing([], 4.0) is None


def write_run(path, step_s, comm_s, losses, bytes_per_step, every=10):
    """Write the events of the first step and of every ``every`` steps, and a report."""
    path.mkdir()
    events = [{"type": "run_start", "model": {"trainable_parameters": 9_000_000}}]
    events.append(
        {"type": "step", "step": 1, "loss": 9.0, "step_time_s": 2 * step_s, "comm_wait_s": comm_s}
    )
    for number, loss in enumerate(losses, 1):
        step = {
            "type": "step",
            "step": number * every,
            "loss": loss,
            "step_time_s": step_s,
            "comm_wait_s": comm_s,
        }
        events += [step, {"type": "eval", "step": number * every, "loss": loss}]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "report.json").write_text(
        json.dumps({"traffic_bytes_per_step": {"measured": bytes_per_step}})
    )
    return path


@pytest.fixture
def runs(tmp_path):
    values = {
        "ddp": (3.0, 2.5, [7.0, 6.0], 1000),
        "topk": (0.5, 0.1, [7.5, 6.25, 5.75], 20),
        "diloco": (0.6, 0.1, [7.5, 6.03, 5.5], 50),
        "bf16": (4.0, 3.5, [7.2, 6.1, 5.9], 500),
        "signsgd": (0.5, 0.2, [8.0, 7.0, 6.5], 32),
    }
    return {
        name: report.read_run(name, write_run(tmp_path / name, *arguments), [1, 2], 9.0)
        for name, arguments in values.items()
    }


def conditions(rate=1e8, delay=0.01):
    machine = {
        "cores": 2,
        "architecture": "x86_64",
        "memory_gib": 8,
        "python": "3.11",
        "torch": "2.13",
    }
    measured_link = {"how": "veth", "round_trip_s": 0.02, "stream_bits_per_s": 9e7}
    measured_link |= {"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "1"}
    link = {"rate_bits_per_s": rate, "delay_s": delay, "loss": 0.0, "text": "100 Mbit/s"}
    settings = {
        "ddp": {"parallel.mode": "ddp"},
        "topk": {"parallel.mode": "ddp", "compression.method": "topk"},
    }
    result = {
        "date": "2030-01-31",
        "machine": machine,
        "hosts": 2,
        "link": link,
        "link_measured": measured_link,
        "steps": 20,
    }
    return {**result, "extra_steps": 10, "evaluate_every": 10, "settings": settings}


def test_read_run_accumulates_seconds_over_logging_intervals(runs):
    ddp = runs["ddp"]
    assert ddp.times_at(20) == (pytest.approx(6.0 + 19 * 3.0), pytest.approx(20 * 2.5))
    assert [evaluation.seconds for evaluation in ddp.evaluations] == [
        pytest.approx(33.0),
        pytest.approx(63.0),
    ]
    assert (ddp.loss_at(20), ddp.parameters, ddp.bytes_per_step) == (6.0, 9_000_000, 1000)


def test_summary_compares_with_the_final_loss_of_ddp(runs):
    summary = report.summarize(runs, 20, conditions())
    rows = {row["method"]: row for row in summary["methods"]}
    assert summary["mark"] == 6.0
    assert rows["ddp"]["sooner"] == rows["ddp"]["less_comm"] == 1.0
    assert rows["topk"]["steps_to_mark"] == pytest.approx(25.0)
    assert rows["topk"]["seconds_to_mark"] == pytest.approx(13.0)
    assert rows["topk"]["sooner"] == pytest.approx(63.0 / 13.0)
    assert rows["diloco"]["less_comm"] == pytest.approx(25.0)
    assert rows["diloco"]["loss_difference"] == pytest.approx(0.005)
    assert rows["diloco"]["less_comm_in_all"] == pytest.approx(50 / 3)  # over its 30 steps
    assert rows["diloco"]["final_loss_difference"] == pytest.approx(5.5 / 6 - 1)
    assert rows["signsgd"]["sooner"] is None
    assert {name: report.describe_benefit(row) for name, row in rows.items()} == {
        "ddp": "baseline",
        "topk": "faster than DDP",
        "diloco": "faster than DDP",
        "bf16": "slower than DDP on this link",
        "signsgd": "does not reach the loss of DDP",
    }


def test_goals_apply_only_to_their_links_and_to_long_runs(runs, tmp_path):
    rows = report.summarize(runs, 20, conditions())["methods"]

    def goals_met(rate, delay):
        link = {"rate_bits_per_s": rate, "delay_s": delay, "loss": 0.0}
        return {(goal["method"], goal["what"]): goal["met"] for goal in report.goals(rows, link, 2)}

    slow = [("topk", "sooner"), ("diloco", "less_comm_in_all"), ("diloco", "final_loss_difference")]
    assert goals_met(1e8, 0.01) == dict.fromkeys(slow, True)
    fast = {"topk": True, "diloco": True, "bf16": False, "signsgd": True}
    assert goals_met(1e9, 0.0) == {
        (name, "step_ratio"): expected for name, expected in fast.items()
    }
    assert goals_met(5e7, 0.01) == {}
    assert report.summarize(runs, 20, conditions())["goals"] == []
    long = write_run(tmp_path / "long", 3.0, 2.5, [7.0, 6.0], 1000, every=100)
    long_runs = {
        "ddp": report.read_run("ddp", long, [1, 2], 9.0),
        "topk": report.read_run("topk", long, [1, 2], 9.0),
    }
    summary = report.summarize(long_runs, 200, conditions() | {"steps": 200})
    assert [(goal["method"], goal["met"]) for goal in summary["goals"]] == [("topk", False)]
    assert "| ≥ 4 | missed |" in report.as_markdown(
        summary, {"ddp": "plain", "topk": "one per cent"}
    )


def test_table_shows_measured_link_and_unreached_loss(runs):
    text = report.as_markdown(
        report.summarize(runs, 20, conditions()), {"ddp": "plain", "topk": "one per cent"}
    )
    assert "round trip 20.00 ms, one TCP stream 90.0 Mbit/s" in text
    row = next(line for line in text.splitlines() if line.startswith("| `signsgd`"))
    assert "| 7.0000 (+16.67 %) | 6.5000 (+8.33 %), step 30 | – | – | – |" in row
    assert "- `topk`: `compression.method=topk`: one per cent" in text
    svg = report.as_svg(runs)
    assert svg.count('stroke-width="2"') == 2 * len(runs)


# -- real hosts


def list_namespaces(pid):
    """Return the namespaces that a process created."""
    output = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[0] for line in output.splitlines() if line.startswith(f"paceline-{pid}-")]


def list_stale_namespaces():
    names = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.split()
    return [
        name
        for name in names
        if name.startswith("paceline-") and not Path(f"/proc/{name.split('-')[1]}").exists()
    ]


@pytest.mark.alone
@pytest.mark.alone
@pytest.mark.alone
@pytest.mark.alone
@pytest.mark.soak  # needs root and iproute2
@pytest.mark.parametrize(
    ("hosts", "delay", "loss"), [(2, 0.01, 0.0), (3, 0.005, 0.01), (2, 0.0, 0.0)]
)
def test_network_has_the_requested_link_and_is_removed_afterwards(hosts, delay, loss):
    with netns.Network(hosts, netns.Link(5e7, delay, loss)) as network:
        assert len(list_namespaces(os.getpid())) == hosts + 1
        measured = network.measure()
        sent = network.sent_bytes()
    assert measured["round_trip_s"] >= 2 * delay
    assert 0 < measured["stream_bits_per_s"] <= 1.02 * 5e7
    assert sent[-1] > sent[0] > 0
    assert list_namespaces(os.getpid()) == []


@pytest.mark.soak
def test_removes_namespaces_of_killed_processes():
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    subprocess.run(["ip", "netns", "add", f"paceline-{killed.pid}-h0"], check=True)
    netns.remove_stale_namespaces()
    assert list_namespaces(killed.pid) == []


@pytest.mark.soak
def test_script_trains_over_the_link_and_writes_the_table(tmp_path):
    arguments = (
        "--steps",
        "4",
        "--evaluate-every",
        "2",
        "--extra",
        "0",
        "--methods",
        "topk",
        "--rate",
        "400mbit",
    )
    completed = run_script(*arguments, "--delay", "1ms", "--output", str(tmp_path / "table"))
    assert completed.returncode == 0, completed.stderr
    assert "| `topk` |" in completed.stdout
    table = json.loads((tmp_path / "table.json").read_text())
    ddp, topk = table["runs"]["ddp"], table["runs"]["topk"]
    assert ddp["bytes_per_step"] >= 4 * table["parameters"]
    assert ddp["bytes_per_step"] >= 40 * topk["bytes_per_step"]
    assert min(ddp["wire_bytes"]) >= 4 * ddp["bytes_per_step"]
    assert (tmp_path / "table.svg").read_text().startswith("<svg")
    assert list_stale_namespaces() == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("signal_number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_signal_removes_the_namespaces(signal_number, exit_code):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "measured: round trip" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(3)  # until the ranks have started
    process.send_signal(signal_number)
    assert process.wait(120) == exit_code
    assert list_namespaces(process.pid) == []

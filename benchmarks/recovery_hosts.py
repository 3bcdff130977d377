"""Measure the time that a run on two hosts takes to recover from a fault, with Paceline's launcher
and with torchrun.

python benchmarks/recovery_hosts.py [--rounds N] [--json] [--output FILE]

The hosts are network namespaces (Linux, root, iproute2). Both contenders run the same configuration
with the same checkpoints; torchrun starts `-m paceline` on each host, with
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and equal rendezvous settings. They are measured in turns,
and each figure is the median over the rounds.

- killed rank: from `kill -9` of rank 1 to the end of the first step after it;
- killed host: from `kill -9` of all processes of a host, which is restarted immediately, to the end
  of the first step after it;
- shrink: the same with `nnodes: 1:2`, and the host is restarted only after the measurement;
- start: `nnodes: 1:2` with only one host, which is the minimum, from the moment at which the
  rendezvous endpoint listens to the start of the rank.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from netns import Link, Network, NetworkError
from run import describe_machine, log_line, report_results

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("cluster", "launch", "")
]

from commands import MICRO  # noqa: E402
from hosts import PORT, Cluster  # noqa: E402

SETTINGS = (
    "max_steps=100000",
    "save_steps=10",
    "logging_steps=1",
    "parallel.collective_timeout_s=120",
    "recovery.max_restarts=100",
)
MAX_RATIO_TO_TORCHRUN = 0.8
MAX_SECONDS = {"killed host": 30.0, "shrink": 30.0, "start": 5.0}
_KEEP_ALIVE = "last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=3"
Starter = Callable[[Cluster, int, str], None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="number of faults of each kind (default 6)"
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the table) and FILE.json (all measurements)"
    )
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    try:
        figures = measure(args.rounds)
    except NetworkError as error:
        log_line(f"error: {error}")
        return 2
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "load_before": round(load_before, 1),
        "figures": figures,
    }
    return report_results(args, result, as_markdown(result))


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round by contender and fault."""
    figures: dict[str, dict[str, list[float]]] = {"paceline": {}, "torchrun": {}}
    halves = [rounds - rounds // 2, rounds // 2]
    # The contenders alternate, so that other load on the machine affects both.
    for number in filter(None, halves):
        for name, start in (("paceline", start_paceline), ("torchrun", start_torchrun)):
            record(figures[name], "killed rank", measure_faults(start, "2", [kill_rank] * number))
        killed_host = measure_faults(start_paceline, "2", [kill_host] * number)
        record(figures["paceline"], "killed host", killed_host)
        shrunk = measure_faults(start_paceline, "1:2", [shrink] * number)
        record(figures["paceline"], "shrink", shrunk)
        record(figures["paceline"], "start", [measure_start() for _ in range(number)])
    return figures


def record(figures: dict[str, list[float]], fault: str, seconds: Sequence[float]) -> None:
    figures.setdefault(fault, []).extend(seconds)
    log_line(f"{fault}: {', '.join(f'{value:.1f}' for value in seconds)} s")


# -- contenders
def start_paceline(cluster: Cluster, number: int, nnodes: str) -> None:
    cluster.start(number, *SETTINGS, nnodes=nnodes)


def start_torchrun(cluster: Cluster, number: int, nnodes: str) -> None:
    rendezvous = f"is_host={int(number == cluster.endpoint)},{_KEEP_ALIVE}"
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1",
        "--max-restarts=100", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=bench",
        f"--rdzv-endpoint={cluster.endpoint_address}:{PORT}",
        f"--rdzv-conf={rendezvous}", f"--local-addr={cluster.hosts[number].address}",
        "-m", "paceline", "sft", *MICRO, *SETTINGS, f"output_dir={cluster.run}",
    ]  # fmt: skip
    cluster.execute(
        number, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", GLOO_SOCKET_IFNAME="eth0"
    )


# -- faults
def measure_faults(
    start: Starter, nnodes: str, faults: Sequence[Callable[[Cluster, Starter], float]]
) -> list[float]:
    """Start a run, inject the faults one after the other, and return the seconds to recover."""
    with (
        Network(2, Link(1e9)) as network,
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
    ):
        cluster = Cluster(network, Path(folder), shared=True, endpoint=0)
        try:
            for number in range(2):
                start(cluster, number, nnodes)
            seconds = []
            for fault in faults:
                cluster.wait_for_start(1, world_size=2)
                # in the middle between two checkpoints
                cluster.wait_for_step(last_resumed_step(cluster) + 14)
                seconds.append(fault(cluster, start))
            return seconds
        finally:
            cluster.close()


def kill_rank(cluster: Cluster, start: Starter) -> float:
    (rank,) = cluster.hosts[1].ranks()
    begin = time.time()
    rank.kill()
    return seconds_to_step(cluster, begin, world_size=2)


def kill_host(cluster: Cluster, start: Starter) -> float:
    begin = time.time()
    cluster.hosts[1].kill()
    start(cluster, 1, "2")
    return seconds_to_step(cluster, begin, world_size=2)


def shrink(cluster: Cluster, start: Starter) -> float:
    begin = time.time()
    cluster.hosts[1].kill()
    seconds = seconds_to_step(cluster, begin, world_size=1)
    start(cluster, 1, "1:2")
    seconds_to_step(cluster, time.time(), world_size=2)
    return seconds


def seconds_to_step(cluster: Cluster, begin: float, world_size: int) -> float:
    """Wait for the first step of the attempt that started after ``begin``, and return the seconds
    from ``begin`` to it."""

    def find_step() -> float | None:
        events = [event for event in cluster.events("run_start", "step") if event["time"] > begin]
        starts = [
            index
            for index, event in enumerate(events)
            if event["type"] == "run_start" and event["world_size"] == world_size
        ]
        steps = (
            [event["time"] for event in events[starts[-1] :] if event["type"] == "step"]
            if starts
            else []
        )
        return steps[0] - begin if steps else None

    cluster.wait(find_step, "a step after the fault")
    return find_step() or 0.0


def measure_start() -> float:
    """Return the seconds from the moment at which the endpoint listens to the start of the rank."""
    with (
        Network(2, Link(1e9)) as network,
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
    ):
        cluster = Cluster(network, Path(folder), shared=True, endpoint=0)
        try:
            host = cluster.start(0, *SETTINGS, nnodes="1:2")
            wait_for_port = network.on(
                0, [sys.executable, "-c", _WAIT_FOR_PORT, cluster.endpoint_address, str(PORT)]
            )
            begin = float(run_command(wait_for_port))
            cluster.wait(host.ranks, "a rank")
            return host.ranks()[0].create_time() - begin
        finally:
            cluster.close()


_WAIT_FOR_PORT = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
        break
    except OSError:
        time.sleep(0.02)
print(time.time())
"""


def run_command(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def last_resumed_step(cluster: Cluster) -> int:
    starts = cluster.events("run_start")
    return int(starts[-1]["resumed_from_step"] or 0) if starts else 0


# -- results
def as_markdown(result: dict[str, Any]) -> str:
    machine, ours, theirs = (
        result["machine"],
        result["figures"]["paceline"],
        result["figures"]["torchrun"],
    )
    ratio = median(ours["killed rank"]) / median(theirs["killed rank"])
    busy = (
        " Other processes were running on the machine: the ratio is of alternating"
        " measurements, but"
        " the seconds are longer than on an idle machine."
        if result["load_before"] > 1
        else ""
    )
    lines = [
        "# Time to recover from a fault on two hosts",
        "",
        (
            f"{result['date']}: two network namespaces with one CPU rank each, on"
            f" {machine['cores']} cores ({machine['architecture']}), Python {machine['python']},"
            f" torch {machine['torch']}; a checkpoint every 10 steps. Load average at the start:"
            f" {result['load_before']}.{busy}"
        ),
        "",
        "| fault | median | rounds | longest | goal | met |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for name, seconds in ours.items():
        bound = MAX_SECONDS.get(name)
        goal = f"≤ {bound:g} s" if bound else f"≤ {MAX_RATIO_TO_TORCHRUN} × torchrun ({ratio:.2f})"
        is_met = median(seconds) <= bound if bound else ratio <= MAX_RATIO_TO_TORCHRUN
        times = f"{median(seconds):.1f} s | {len(seconds)} | {max(seconds):.1f} s"
        lines.append(f"| {name} | {times} | {goal} | {'yes' if is_met else 'NO'} |")
    rivals = theirs["killed rank"]
    lines.append(
        f"| killed rank, torchrun | {median(rivals):.1f} s | {len(rivals)} | {max(rivals):.1f} s"
        " | | |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

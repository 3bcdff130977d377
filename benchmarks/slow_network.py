"""One training job over a slow network, once for each way to make communication small, against
plain DDP.

python benchmarks/slow_network.py [--rate 100mbit] [--delay 10ms] [--loss 0] [--hosts 2] [--steps
                                  200] [--methods ddp,powersgd,topk,diloco] [--output FILE]

The hosts are network namespaces of this machine, so this needs Linux, root and iproute2. See
benchmarks/README.md.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import netns
from common import BenchmarkFailed
from netns import Link, Network, NetworkError
from run import _machine, log_line, write_results
from slow_network_report import Run, as_markdown, as_svg, read_run, summary

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "demo.yaml"
# of this and the example's 2e-3 the one with which plain DDP comes further in 200 steps
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20
MIN_PARAMETERS = 8_000_000
_MASTER_PORT = 29500
_POLL_S = 0.1

#: name → (settings of Paceline beside those that all share, why these)
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "plain data parallelism: what the others are measured against"),
    "bf16": ({"compression.method": "bf16"}, "gradients in half the bits"),
    "fp16": ({"compression.method": "fp16"}, "gradients in half the bits"),
    "int8": ({"compression.method": "int8"}, "gradients in a quarter of the bits"),
    "powersgd": (
        {"compression.method": "powersgd", "compression.rank": 8, "parallel.bucket_cap_mb": 64},
        (
            "rank 8: a lower one sends less and takes more steps, a higher one the reverse. One"
            " bucket: what is sent is small, and each bucket costs two messages one after the other"
        ),
    ),
    "topk": (
        {"compression.method": "topk", "compression.ratio": 0.01},
        "1 % of the elements, the goal's setting",
    ),
    "randomk": (
        {"compression.method": "randomk", "compression.ratio": 0.01},
        "1 % of the elements, by chance",
    ),
    "signsgd": (
        {"compression.method": "signsgd"},
        "signs by majority vote, at the learning rate of the others",
    ),
    "local_sgd": (
        {"parallel.mode": "local_sgd", "local_sgd.sync_every": 5},
        "parameters averaged every 5 steps",
    ),
    "diloco": (
        {
            "parallel.mode": "diloco",
            "local_sgd.sync_every": 5,
            "local_sgd.fragment_sync_delay": 2,
            "local_sgd.outer_dtype": "int8",
            "local_sgd.outer_learning_rate": 1.0,
            "local_sgd.outer_momentum": 0,
            "train_args.learning_rate": 1.8e-3,
        },
        (
            "H = 5 with outer gradients in int8: 1/20 of DDP's bytes a step, on their way beside"
            " the next two steps. In so short a run outer momentum, or an outer rate above 1, comes"
            " out behind. Half of DDP's batch makes a worker's gradient noisier and Adam's steps"
            " along it shorter; so the inner rate, which Douillard et al. (2023) tune as well, is"
            " higher"
        ),
    ),
}
DEFAULT = "ddp,powersgd,topk,diloco"


def main() -> int:
    args = read_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
            Network(args.hosts, Link(args.rate, args.delay, args.loss)) as network,
        ):
            link = network.measure()
            for line in _describe(args, network, link):
                log_line(line)
            runs: dict[str, Run] = {}
            for name in args.methods:
                steps = args.steps if name == "ddp" else args.steps + args.extra
                runs[name] = run_method(network, Path(folder), name, steps, args)
                log_line(f"{name:<10} {runs[name].text(args.steps)}")
    except NetworkError as error:
        log_line(f"error: {error}")
        return 2
    except BenchmarkFailed as error:
        log_line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        log_line("stopped: the hosts were removed, nothing was written")
        return 130
    result = summary(runs, args.steps, about(args, network, link))
    text = as_markdown(result, {name: METHODS[name][1] for name in runs})
    if args.output is not None:
        written = write_results(args.output, result, text)
        written.append(written[0].with_suffix(".svg"))
        written[-1].write_text(as_svg(runs), encoding="utf-8")
        for path in written:
            log_line(f"wrote {path}")
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def _on_sigterm(*_: object) -> None:
    log_line("SIGTERM: the hosts were removed, nothing was written")
    sys.exit(143)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; what is wrong with it ends the process with 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate",
        type=_checked(netns.parse_rate),
        default="100mbit",
        help="of each host's link (100mbit)",
    )
    parser.add_argument(
        "--delay", type=_checked(netns.parse_delay), default="10ms", help="each way (10ms)"
    )
    parser.add_argument(
        "--loss", type=_checked(netns.parse_loss), default="0", help="per cent of the packets (0)"
    )
    parser.add_argument("--hosts", type=int, default=2, help="one rank on each (2)")
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="of plain DDP, whose last evaluation is the mark (200)",
    )
    parser.add_argument(
        "--extra",
        type=int,
        help="steps that the others may take beyond, to reach the mark (three tenths)",
    )
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="STEPS", help="(10)")
    parser.add_argument(
        "--methods", type=_names, default=DEFAULT, help=f"some of {','.join(METHODS)} ({DEFAULT})"
    )
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="[METHOD:]KEY=VALUE"
    )
    parser.add_argument(
        "--timeout", type=float, default=3600, metavar="SECONDS", help="for one method (3600)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything measured as one JSON value"
    )
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables), FILE.svg (the plots) and FILE.json"
    )
    args = parser.parse_args(arguments)
    if not 2 <= args.hosts <= netns.MAX_HOSTS:
        parser.error(f"--hosts {args.hosts}; allowed: 2 to {netns.MAX_HOSTS}")
    if (
        args.evaluate_every < 1
        or args.steps < 2 * args.evaluate_every
        or args.steps % args.evaluate_every
    ):
        parser.error(
            f"--steps {args.steps} with --evaluate-every {args.evaluate_every}; allowed: a multiple"
            " of it, twice or more"
        )
    if args.extra is None:
        args.extra = 3 * args.steps // 10
    if args.extra < 0 or args.timeout <= 0:
        parser.error("--extra is at least 0, --timeout above it")
    args.extra = -(-args.extra // args.evaluate_every) * args.evaluate_every
    return args


def _checked(parse: Callable[[str], float]) -> Callable[[str], float]:
    def checked(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _names(text: str) -> list[str]:
    """``ddp`` comes first, asked for or not: it is what the others are measured against."""
    names = text.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(METHODS)}")
    return list(dict.fromkeys(["ddp", *names]))


def _setting(text: str) -> tuple[str, str, str]:
    """``topk:compression.ratio=0.02`` → (method, or nothing for all, key, value)."""
    key, equals, value = text.partition("=")
    method, colon, rest = key.rpartition(":")
    if not rest or not equals or (colon and method not in METHODS):
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: KEY=VALUE for all methods, or METHOD:KEY=VALUE, such as"
            " topk:compression.ratio=0.02"
        )
    return method, rest, value


# -- a run


def settings_of(name: str, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """What `paceline sft` is given on top of the example: the same for all methods but for their
    own settings.

    The learning rate rises and then stays: so a run's first steps do not depend on how many will
    follow, and a method may take longer than DDP to come to the same loss.
    """
    every = args.evaluate_every
    return {
        "parallel.device": "cpu",
        "parallel.mode": "ddp",
        "lora.enable": "false",
        "train_args.learning_rate": LEARNING_RATE,
        "train_args.lr_scheduler_type": "constant_with_warmup",
        "train_args.warmup_ratio": 0,
        "train_args.warmup_steps": min(WARMUP_STEPS, args.steps // 10),
        "train_args.max_steps": steps,
        "train_args.logging_steps": every,
        "train_args.eval_steps": every,
        "train_args.save_steps": 0,
        **METHODS[name][0],
        **{key: value for method, key, value in args.set if method in ("", name)},
    }


def run_method(
    network: Network, folder: Path, name: str, steps: int, args: argparse.Namespace
) -> Run:
    """`paceline sft`, one rank on each host, started as torchrun would start it."""
    output = folder / name
    settings = {"output_dir": output, **settings_of(name, steps, args)}
    command = [sys.executable, "-m", "paceline", "sft", "--config", str(CONFIG)]
    command += [f"{key}={value}" for key, value in settings.items()]
    before = network.sent_bytes()
    started_at = time.monotonic()
    _run_ranks(network, command, folder, name, args.timeout)
    wall_s = time.monotonic() - started_at
    sent = [after - earlier for after, earlier in zip(network.sent_bytes(), before, strict=True)]
    run = read_run(name, output, sent, wall_s)
    if run.parameters < MIN_PARAMETERS:
        raise BenchmarkFailed(
            f"the model has {run.parameters:,} parameters; at least {MIN_PARAMETERS:,} are meant to"
            " be sent"
        )
    return run


def _run_ranks(
    network: Network, command: list[str], folder: Path, name: str, timeout_s: float
) -> None:
    """Wait for all processes. If one fails, stop the others."""
    world = len(network.hosts)
    shared = {
        "WORLD_SIZE": world,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": _MASTER_PORT,
        "GLOO_SOCKET_IFNAME": netns.DEVICE,
        # the hosts share this machine's cores
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // world),
        "XDG_CACHE_HOME": folder / "cache",
        "HF_HUB_OFFLINE": 1,
    }
    logs = [folder / f"{name}-{rank}.txt" for rank in range(world)]
    processes: list[Any] = []
    try:
        for rank, log in enumerate(logs):
            env = {
                **os.environ,
                **{key: str(value) for key, value in shared.items()},
                "RANK": str(rank),
            }
            with open(log, "wb") as handle:
                processes.append(
                    netns.start(network.on(rank, command), stdout=handle, stderr=handle, env=env)
                )
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
        running = any(process.poll() is None for process in processes)
    finally:
        netns.end(processes)
    if failed is not None or running:
        rank = failed or 0
        how = (
            f"ended with {processes[rank].returncode}"
            if failed is not None
            else f"ran longer than {timeout_s:g} s"
        )
        tail = logs[rank].read_text(errors="replace")[-3000:]
        raise BenchmarkFailed(f"{name}: rank {rank} {how}:\n{tail}")


# -- what is said of it


def about(args: argparse.Namespace, network: Network, measured: dict[str, Any]) -> dict[str, Any]:
    """Under what conditions the figures were taken."""
    return {
        "date": date.today().isoformat(),
        "machine": _machine(),
        "hosts": args.hosts,
        "link": {**asdict(network.link), "text": network.link.text},
        "link_measured": measured,
        "steps": args.steps,
        "extra_steps": args.extra,
        "evaluate_every": args.evaluate_every,
        "settings": {name: settings_of(name, args.steps, args) for name in args.methods},
    }


def _describe(args: argparse.Namespace, network: Network, link: dict[str, Any]) -> list[str]:
    return [
        f"{args.hosts} hosts, one rank on each; asked for: {network.link.text}",
        (
            f"link made of {link['how']}; measured: round trip {1e3 * link['round_trip_s']:.2f} ms,"
            f" one TCP stream ({link['tcp_congestion_control']})"
            f" {link['stream_bits_per_s'] / 1e6:.1f} Mbit/s"
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())

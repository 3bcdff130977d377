"""Compare the methods that reduce communication with plain DDP, over a slow network.

python benchmarks/slow_network.py [--rate 100mbit] [--delay 10ms] [--loss 0] [--hosts 2]
                                  [--steps 200] [--methods ddp,powersgd,topk,diloco] [--output FILE]

Trains the same model once with each method. The hosts are network namespaces, so this needs Linux,
root and iproute2. See benchmarks/README.md.
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
from run import describe_machine, log_line, write_results
from slow_network_report import Run, as_markdown, as_svg, read_run, summarize

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "benchmarks" / "configs" / "slow_network.yaml"
# Plain DDP reaches a lower loss in 200 steps with this than with the example's 2e-3.
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20
MIN_PARAMETERS = 8_000_000
_MASTER_PORT = 29500
_POLL_S = 0.1

#: Method → (settings in addition to the common ones, the reason for them).
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "plain data parallelism, the baseline"),
    "bf16": ({"compression.method": "bf16"}, "gradients in half the bits"),
    "fp16": ({"compression.method": "fp16"}, "gradients in half the bits"),
    "int8": ({"compression.method": "int8"}, "gradients in a quarter of the bits"),
    "powersgd": (
        {"compression.method": "powersgd", "compression.rank": 8, "parallel.bucket_cap_mb": 64},
        (
            "rank 8: a lower rank sends less but needs more steps. One bucket, because each bucket"
            " costs two consecutive messages, and the messages are small"
        ),
    ),
    "topk": (
        {"compression.method": "topk", "compression.ratio": 0.01},
        "1 % of the elements, as in the goal",
    ),
    "randomk": (
        {"compression.method": "randomk", "compression.ratio": 0.01},
        "1 % of the elements, randomly drawn",
    ),
    "signsgd": (
        {"compression.method": "signsgd"},
        "signs by majority vote, at the common learning rate",
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
            "H = 5 with outer gradients in int8: 1/20 of the bytes of DDP per step, sent during the"
            " next two steps. In a run this short, outer momentum or an outer learning rate above 1"
            " gives a higher loss. A worker has half the batch of DDP, so its gradients are noisier"
            " and the steps of Adam shorter; the inner learning rate, which Douillard et al. (2023)"
            " tune as well, is therefore higher"
        ),
    ),
}
DEFAULT_METHODS = "ddp,powersgd,topk,diloco"


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
        log_line("interrupted: removed the hosts; nothing was written")
        return 130
    result = summarize(runs, args.steps, describe_conditions(args, network, link))
    text = as_markdown(result, {name: METHODS[name][1] for name in runs})
    if args.output is not None:
        paths = write_results(args.output, result, text)
        paths.append(paths[0].with_suffix(".svg"))
        paths[-1].write_text(as_svg(runs), encoding="utf-8")
        for path in paths:
            log_line(f"wrote {path}")
    print(json.dumps(result, indent=2) if args.json else text)
    return 0


def _on_sigterm(*_: object) -> None:
    log_line("SIGTERM: removed the hosts; nothing was written")
    sys.exit(143)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; exit with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate",
        type=_argument_type(netns.parse_rate),
        default="100mbit",
        help="rate of the link of each host (default 100mbit)",
    )
    parser.add_argument(
        "--delay",
        type=_argument_type(netns.parse_delay),
        default="10ms",
        help="delay in each direction (default 10ms)",
    )
    parser.add_argument(
        "--loss",
        type=_argument_type(netns.parse_loss),
        default="0",
        help="lost packets in percent (default 0)",
    )
    parser.add_argument(
        "--hosts", type=int, default=2, help="number of hosts, with one rank on each (default 2)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="steps of plain DDP, whose last evaluation is the mark (default 200)",
    )
    parser.add_argument(
        "--extra",
        type=int,
        help="additional steps of the other methods to reach the mark (default 30 %% of --steps)",
    )
    parser.add_argument(
        "--evaluate-every",
        type=int,
        default=10,
        metavar="STEPS",
        help="steps between evaluations (default 10)",
    )
    parser.add_argument(
        "--methods",
        type=_names,
        default=DEFAULT_METHODS,
        help=f"comma-separated, from {','.join(METHODS)} (default {DEFAULT_METHODS})",
    )
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="[METHOD:]KEY=VALUE",
        help="change a setting of one method or of all methods",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600,
        metavar="SECONDS",
        help="time limit per method (default 3600)",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument(
        "--output", type=Path, help="write FILE.md (the tables), FILE.svg (the plots) and FILE.json"
    )
    args = parser.parse_args(arguments)
    if not 2 <= args.hosts <= netns.MAX_HOSTS:
        parser.error(f"--hosts {args.hosts}: expected an integer between 2 and {netns.MAX_HOSTS}")
    if (
        args.evaluate_every < 1
        or args.steps < 2 * args.evaluate_every
        or args.steps % args.evaluate_every
    ):
        parser.error(
            f"--steps {args.steps}: expected a multiple of --evaluate-every"
            f" {args.evaluate_every} that"
            " is at least twice as large"
        )
    if args.extra is None:
        args.extra = 3 * args.steps // 10
    if args.extra < 0 or args.timeout <= 0:
        parser.error("--extra must be at least 0, and --timeout must be positive")
    args.extra = -(-args.extra // args.evaluate_every) * args.evaluate_every
    return args


def _argument_type(parse: Callable[[str], float]) -> Callable[[str], float]:
    def parse_argument(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _names(text: str) -> list[str]:
    """Return the methods, with ``ddp`` first even if it is not requested, because it is the
    baseline."""
    names = text.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown methods: {', '.join(unknown)}. Choose from: {', '.join(METHODS)}"
        )
    return list(dict.fromkeys(["ddp", *names]))


def _setting(text: str) -> tuple[str, str, str]:
    """Return (method, key, value) of ``topk:compression.ratio=0.02``; the method is empty for
    all."""
    key, equals, value = text.partition("=")
    method, colon, setting = key.rpartition(":")
    if not setting or not equals or (colon and method not in METHODS):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected KEY=VALUE for all methods, or METHOD:KEY=VALUE, such as"
            " topk:compression.ratio=0.02"
        )
    return method, setting, value


# -- runs


def method_settings(name: str, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides of the example's configuration: the common ones, then those of the
    method.

    The learning rate is constant after the warm-up. The first steps of a run therefore do not
    depend on its length, and a method may need more steps than DDP to reach the same loss.
    """
    return {
        "parallel.device": "cpu",
        "parallel.mode": "ddp",
        "lora.enable": "false",
        "train_args.learning_rate": LEARNING_RATE,
        "train_args.lr_scheduler_type": "constant_with_warmup",
        "train_args.warmup_ratio": 0,
        "train_args.warmup_steps": min(WARMUP_STEPS, args.steps // 10),
        "train_args.max_steps": steps,
        "train_args.logging_steps": args.evaluate_every,
        "train_args.eval_steps": args.evaluate_every,
        "train_args.save_steps": 0,
        **METHODS[name][0],
        **{key: value for method, key, value in args.set if method in ("", name)},
    }


def run_method(
    network: Network, folder: Path, name: str, steps: int, args: argparse.Namespace
) -> Run:
    """Run `paceline sft` with one rank on each host, started as torchrun would start it."""
    output = folder / name
    settings = {"output_dir": output, **method_settings(name, steps, args)}
    command = [sys.executable, "-m", "paceline", "sft", "--config", str(CONFIG)]
    command += [f"{key}={value}" for key, value in settings.items()]
    sent_before = network.sent_bytes()
    started_at = time.monotonic()
    _run_ranks(network, command, folder, name, args.timeout)
    wall_s = time.monotonic() - started_at
    sent = [
        after - earlier for after, earlier in zip(network.sent_bytes(), sent_before, strict=True)
    ]
    run = read_run(name, output, sent, wall_s)
    if run.parameters < MIN_PARAMETERS:
        raise BenchmarkFailed(
            f"the model has {run.parameters:,} trainable parameters; expected at least"
            f" {MIN_PARAMETERS:,}"
        )
    return run


def _run_ranks(
    network: Network, command: list[str], folder: Path, name: str, timeout_s: float
) -> None:
    """Start the ranks and wait for them. If one fails, stop the others."""
    world_size = len(network.hosts)
    common_env = {
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": _MASTER_PORT,
        "GLOO_SOCKET_IFNAME": netns.DEVICE,
        # The hosts share the cores of the machine.
        "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // world_size),
        "XDG_CACHE_HOME": folder / "cache",
        "HF_HUB_OFFLINE": 1,
    }
    logs = [folder / f"{name}-{rank}.txt" for rank in range(world_size)]
    processes: list[Any] = []
    try:
        for rank, log in enumerate(logs):
            env = {
                **os.environ,
                **{key: str(value) for key, value in common_env.items()},
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
        netns.terminate(processes)
    if failed is not None or running:
        rank = failed or 0
        outcome = (
            f"exited with code {processes[rank].returncode}"
            if failed is not None
            else f"timed out after {timeout_s:g} s"
        )
        tail = logs[rank].read_text(errors="replace")[-3000:]
        raise BenchmarkFailed(f"{name}: rank {rank} {outcome}:\n{tail}")


# -- description


def describe_conditions(
    args: argparse.Namespace, network: Network, measured_link: dict[str, Any]
) -> dict[str, Any]:
    """Return the conditions of the measurement."""
    return {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "hosts": args.hosts,
        "link": {**asdict(network.link), "text": network.link.text},
        "link_measured": measured_link,
        "steps": args.steps,
        "extra_steps": args.extra,
        "evaluate_every": args.evaluate_every,
        "settings": {name: method_settings(name, args.steps, args) for name in args.methods},
    }


def _describe(args: argparse.Namespace, network: Network, link: dict[str, Any]) -> list[str]:
    return [
        f"{args.hosts} hosts, one rank on each; requested link: {network.link.text}",
        (
            f"link built with {link['how']}; measured: round trip"
            f" {1e3 * link['round_trip_s']:.2f} ms,"
            f" one TCP stream ({link['tcp_congestion_control']})"
            f" {link['stream_bits_per_s'] / 1e6:.1f} Mbit/s"
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Check by trial what `parallel.mode: auto` chooses on CPU ranks: in each case, every mode and
every division of the global batch into micro-batches is timed, then the choice against the fastest
others in interleaved rounds. Slow links are loopback devices with a limited rate, in a network
namespace (needs Linux, root and iproute2).

python benchmarks/planner_trials.py --measure FILE.json [--cases 3,9]   continues an unfinished file
python benchmarks/planner_trials.py --table FILE.json                   writes FILE.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import netns
import planner_cpu
from run import log_line

from paceline.bench.intervals import geometric_estimate
from paceline.bench.short_runs import RunLength, run_short
from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.core.processes import end_with_parent
from paceline.planner.auto.choose import eligible_layouts
from paceline.planner.auto.pick import pick
from paceline.planner.machine.local import local_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.planner.search.search import Candidate
from paceline.planner.search.space import RECOMPUTATION, open_space
from paceline.planner.search.trials import Trials, with_settings
from paceline.train.run_spec import TrainResult

_SCREENING, _FEWEST_STEPS, _WARM_UP = RunLength(2, 1), 3, 2
#: Rounds in which the choice and its rivals run in turn, and the number of rivals.
_ROUNDS, _RIVALS = 5, 2
#: A choice is as good as the best if it takes at most this factor of its time.
_TOLERANCE = 1.05
_SIZE = "train_args.per_device_train_batch_size"
_ACCUMULATION = "train_args.gradient_accumulation_steps"
#: Seconds of the measured steps of a run, if a step is short, and the most steps.
_PAIR_S, _MOST_STEPS = 1.0, 20
#: Seconds whose bytes the loopback device sends at once, as one packet.
_BURST_S = 5e-4

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run of which everything but the model, the data and the global batch is open.

    Args:
        link: rate of the loopback device, such as ``1gbit``; None: not limited.
    """

    model: str
    is_lora: bool
    ranks: int
    link: str | None
    length: int
    batch: int

    @property
    def name(self) -> str:
        trained = "LoRA" if self.is_lora else "full"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.link or 'loopback'}"
        return f"{self.model} {trained}, {ranks}, {self.batch} × {self.length} tokens"


def _cases() -> Iterator[Case]:
    for model in ("2M", "7M", "18M"):
        yield Case(model, False, 1, None, 128, 8)
    yield Case("7M", True, 1, None, 128, 8)
    for link in (None, "1gbit"):
        for model in ("2M", "7M", "18M"):
            yield Case(model, False, 2, link, 128, 8)
        yield Case("33M", False, 2, link, 128, 4)
        yield Case("7M", False, 2, link, 512, 4)
        yield Case("7M", True, 2, link, 128, 8)
        yield Case("18M", True, 2, link, 128, 4)
        yield Case("18M", True, 2, link, 256, 4)
    yield Case("2M", False, 2, "300mbit", 128, 4)
    yield Case("2M", False, 2, "300mbit", 256, 8)
    yield Case("2M", True, 2, "300mbit", 128, 8)
    yield Case("7M", True, 2, "300mbit", 128, 4)
    yield Case("18M", True, 2, "300mbit", 128, 8)
    yield Case("33M", True, 2, "300mbit", 128, 4)


CASES = tuple(_cases())


def open_config(folder: Path, case: Case) -> Loaded:
    """Return the config of which `auto` chooses the rest; its model is in ``folder``."""
    return load_config(
        None,
        {
            **_common(folder, case),
            "parallel.mode": "auto",
            "train_args.global_batch_size": case.batch,
        },
    )


def trial_config(folder: Path, case: Case, settings: Settings) -> Loaded:
    """Return the config of a configuration."""
    return load_config(None, {**_common(folder, case), **settings})


def _common(folder: Path, case: Case) -> Settings:
    return {
        "model": str(folder / case.model),
        "dataset": str(folder / "train.jsonl"),
        "truncation_strategy": "truncate",
        "parallel.device": "cpu",
        "parallel.num_gpus": case.ranks,
        "lora.enable": case.is_lora,
        "train_args.precision": "32",
        "train_args.max_length": case.length,
    }


def configurations(trials: Trials, case: Case) -> list[Settings]:
    """Return the configurations to try: every layout with every micro-batch, and recomputation
    with the simplest layout; on one rank with every micro-batch."""
    space = open_space(trials.config, trials.machine)
    result = []
    for number, layout in enumerate(eligible_layouts(trials.config, case.ranks)):
        for batch_number, batch in enumerate(space.batches(layout.axes.replicas)):
            for saving in space.savings():
                is_tried = number == 0 and (batch_number == 0 or case.ranks == 1)
                if saving.settings and not is_tried:
                    continue
                try:
                    mode = trials.estimate(layout, settings := {**batch, **saving.settings})
                except ConfigError:
                    continue
                if mode.cost is not None and (layout.strategy == "single") == (case.ranks == 1):
                    settings = dict(Candidate(mode, settings).all_settings)
                    result.append(complete(trials.config, settings))
    return result


def complete(config: Config, settings: Settings) -> Settings:
    """Return the settings with those that are left at their values in the config."""
    args = with_settings(config, settings).train_args
    return {
        "parallel.mode": "single",
        _SIZE: args.per_device_train_batch_size,
        _ACCUMULATION: args.gradient_accumulation_steps,
        RECOMPUTATION: "none",
        **settings,
    }


def trials_of(loaded: Loaded, case: Case) -> Trials:
    config = loaded.config
    machine = local_machine(case.ranks, True, config.train_args.compute_format)
    return Trials(config, describe(config), micro_batch(config), machine)


@dataclass(frozen=True)
class Decision:
    """What was decided before anything of a link was timed.

    Args:
        choice: the settings that `auto` takes.
        configurations: all that are tried, the choice among them.
    """

    case: Case
    choice: Settings
    why: str
    configurations: list[Settings]


def decide(folder: Path, case: Case) -> Decision:
    loaded = open_config(folder, case)
    chosen = pick(loaded.config, case.ranks)
    choice = complete(loaded.config, dict(chosen.settings))
    tried = configurations(trials_of(loaded, case), case)
    return Decision(case, choice, chosen.why, tried if choice in tried else [choice, *tried])


# -- measurements
def measure_link(path: Path, link: str | None, numbers: list[int]) -> None:
    """Measure the cases of a link, in a process that is in its namespace. All choices are made
    first, so that no trial is part of the history that they use."""
    from paceline.api import run

    def train(loaded: Loaded) -> TrainResult:
        return run(loaded, time.time(), saves_state=False)

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        planner_cpu.write_models(folder, max(case.length for case in CASES))
        rates = planner_cpu.measured_rates()
        decisions = [(number, decide(folder, CASES[number])) for number in numbers]
        for number, decision in decisions:
            entry = measure_case(folder, decision, train)
            content = read(path)
            content["doctor"][link or "loopback"] = rates
            content["cases"][str(number)] = entry
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            log_line(f"{number} {decision.case.name}: {entry['ratio']:.3f} of the best")


def measure_case(
    folder: Path, decision: Decision, train: Callable[[Loaded], TrainResult]
) -> dict[str, Any]:
    """Time every configuration once, then the choice and the fastest others in turn."""
    case = decision.case

    def seconds(settings: Settings, length: RunLength) -> float:
        return median(run_short(trial_config(folder, case, settings), train, length).step_s)

    screened: list[tuple[Settings, float]] = []
    refused: list[Settings] = []
    for settings in decision.configurations:
        try:
            screened.append((settings, seconds(settings, _SCREENING)))
        except (ConfigError, RunError) as error:
            refused.append({**settings, "error": str(error)})
    fastest = sorted(screened, key=lambda each: each[1])
    rivals = [settings for settings, _ in fastest if settings != decision.choice][:_RIVALS]
    steps = round(_PAIR_S / fastest[0][1])
    length = RunLength(min(_MOST_STEPS, max(_FEWEST_STEPS, steps)), _WARM_UP)
    times: list[list[float]] = []
    for round_number in range(_ROUNDS):
        order = [decision.choice, *rivals]
        turn = order if round_number % 2 == 0 else order[::-1]
        measured = {json.dumps(settings): seconds(settings, length) for settings in turn}
        times.append([measured[json.dumps(settings)] for settings in order])
    return asdict(case) | {
        "name": case.name,
        "choice": decision.choice,
        "why": decision.why,
        "screened": [{"settings": each, "step_s": step_s} for each, step_s in screened],
        "refused": refused,
        "rivals": rivals,
        "rounds_step_s": times,
        **verdict(times),
    }


def verdict(times: list[list[float]]) -> dict[str, Any]:
    """Compare the choice, the first of each round, with the best rival: the ratio of their times
    with its 95 % interval, and whether the choice is as good."""
    ratios = [
        geometric_estimate([each[0] / each[rival] for each in times])
        for rival in range(1, len(times[0]))
    ]
    worst = max(ratios, key=lambda each: each.mean)
    assert worst.low is not None
    is_good = worst.mean <= _TOLERANCE or worst.low <= 1.0
    return {"ratio": worst.mean, "interval": worst.limits, "is_good": is_good}


def _text(settings: Settings) -> str:
    known = ("parallel.mode", _SIZE, _ACCUMULATION, RECOMPUTATION)
    text = f"{settings['parallel.mode']} {settings[_SIZE]} × {settings[_ACCUMULATION]}"
    if settings[RECOMPUTATION] != "none":
        text += f", {settings[RECOMPUTATION]} recomputation"
    others = [f", {key}={value}" for key, value in settings.items() if key not in known]
    return text + "".join(others)


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"doctor": {}, "cases": {}}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@contextmanager
def limited_loopback(rate: str) -> Iterator[list[str]]:
    """Create a network namespace whose loopback device sends at most at this rate, in both
    directions together; yield the start of a command line that runs in it."""
    netns.check_machine()
    name = f"paceline-{os.getpid()}-loopback"
    burst = int(netns.parse_rate(rate) / 8 * _BURST_S)
    shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        up = ["link", "set", "lo", "mtu", str(burst - burst // 50), "up"]
        subprocess.run(["ip", "-n", name, *up], check=True)
        command = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *shape]
        subprocess.run(command, check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def measure(path: Path, numbers: list[int]) -> None:
    """Measure the cases that the file lacks, those of each link in a process of their own."""
    missing = [number for number in numbers if str(number) not in read(path)["cases"]]
    for link in dict.fromkeys(CASES[number].link for number in missing):
        of_link = [number for number in missing if CASES[number].link == link]
        listed = ",".join(str(number) for number in of_link)
        command = [sys.executable, __file__, "--measure", str(path), "--cases", listed, "--here"]
        if link is None:
            subprocess.run(command, check=True)
        else:
            with limited_loopback(link) as prefix:
                subprocess.run([*prefix, *command], check=True)


# -- report
def table(content: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    entries = [content["cases"][number] for number in sorted(content["cases"], key=int)]
    good = sum(entry["is_good"] for entry in entries)
    lines = [
        f"{good} of {len(entries)} choices are within 5 % of the best configuration that was tried,"
        " or not distinguishable from it at 95 % confidence.",
        "",
        "| | case | tried | `auto` chooses | best other | time / best | 95 % interval | good |",
        "| ---: | --- | ---: | --- | --- | ---: | --- | --- |",
    ]
    for number, entry in zip(sorted(content["cases"], key=int), entries, strict=True):
        index = _best_rival(entry["rounds_step_s"])
        low, high = entry["interval"]
        cells = [
            number,
            entry["name"],
            str(len(entry["screened"])),
            _text(entry["choice"]),
            _text(entry["rivals"][index]),
            f"{entry['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
            "yes" if entry["is_good"] else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _best_rival(times: list[list[float]]) -> int:
    means = [
        geometric_estimate([each[0] / each[rival] for each in times]).mean
        for rival in range(1, len(times[0]))
    ]
    return means.index(max(means))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure into FILE")
    parser.add_argument("--cases", metavar="NUMBERS", help="only these cases, separated by commas")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table of FILE")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [int(text) for text in options.cases.split(",")] if options.cases else None
    if options.measure is not None and options.here:
        assert numbers is not None
        end_with_parent()
        measure_link(options.measure, CASES[numbers[0]].link, numbers)
    elif options.measure is not None:
        measure(options.measure, list(range(len(CASES))) if numbers is None else numbers)
    if options.table is not None:
        title = "# What `auto` chooses on CPU ranks, checked by trial"
        text = table(read(options.table))
        options.table.with_suffix(".md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare predicted with measured step times on this machine's CPU ranks: each size of the model is
left out of the fit of the constants of CPU ranks, and then predicted with the rates that
`paceline doctor` measured.

python benchmarks/planner_cpu.py --measure FILE.json [--seconds N]   continues an unfinished file
python benchmarks/planner_cpu.py --output FILE
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
from planner_fit import CpuProblem, CpuRow
from run import log_line

from paceline.bench.short_runs import RunLength, run_short
from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.parallel.registry import layout
from paceline.planner.from_config import setup_of
from paceline.planner.machine.profile import MeasuredLink, rates_from
from paceline.planner.machine.profile import read as read_profile
from paceline.planner.micro_batch import micro_batch
from paceline.planner.time.constants import constants

#: The same cases on two days, on machines of different speed.
RESULTS = tuple(
    Path(__file__).parent / "results" / f"{day}-planner-cpu.json"
    for day in ("2026-11-24", "2026-11-27")
)
LENGTH = 128
_STEPS, _WARM_UP = 5, 2
#: Name → hidden size, layers, inner width.
MODELS = {
    "2M": (128, 4, 416),
    "7M": (256, 6, 832),
    "18M": (384, 8, 1216),
    "33M": (512, 9, 1664),
}
MODES = ("single", "ddp", "zero1", "zero3", "tensor", "pipeline")
MICRO_BATCHES = (1, 4)
_VOCABULARY = 8192


@dataclass(frozen=True)
class Case:
    """A combination that is measured."""

    model: str
    ranks: int
    mode: str
    micro_batch: int
    accumulation: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.mode} micro-batch {self.micro_batch}"


def cases() -> Iterator[Case]:
    for samples in MICRO_BATCHES:
        for mode in MODES:
            for model in MODELS:
                ranks = 1 if mode == "single" else 2
                yield Case(model, ranks, mode, samples, 2 if mode == "pipeline" else 1)


def loaded_config(folder: Path, case: Case) -> Loaded:
    """Return the config of a case; its model is in ``folder``."""
    settings: dict[str, Any] = {
        "model": str(folder / case.model),
        "dataset": str(folder / "train.jsonl"),
        "truncation_strategy": "truncate",
        "parallel.device": "cpu",
        "parallel.num_gpus": case.ranks,
        "parallel.mode": case.mode,
        "lora.enable": False,
        "train_args.precision": "32",
        "train_args.max_length": LENGTH,
        "train_args.per_device_train_batch_size": case.micro_batch,
        "train_args.gradient_accumulation_steps": case.accumulation,
    }
    return load_config(None, settings)


def write_models(folder: Path, length: int = LENGTH) -> None:
    """Write the models, and chats with at least this number of tokens."""
    from paceline.models.builtin import resolve_model

    work = common.make_work(folder, 64, even_tokens=length)
    assert work.train_file == folder / "train.jsonl"
    built_in = Path(resolve_model(common.MODEL))
    for name, (hidden, layers, inner) in MODELS.items():
        fields = json.loads((built_in / "config.json").read_text(encoding="utf-8"))
        heads = hidden // 64
        fields |= {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
        fields |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        fields.pop("layer_types", None)
        config = folder / f"{name}.json"
        config.write_text(json.dumps(fields), encoding="utf-8")
        written = common.random_model(folder / name, config, built_in)
        assert written == str(folder / name)


def measure(path: Path, seconds: float) -> None:
    """Measure the cases that the file lacks, until the time is used up."""
    from paceline.api import run

    started_at = time.monotonic()
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": []}
    done = {(each["model"], each["mode"], each["micro_batch"]) for each in content["cases"]}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        write_models(Path(folder))
        if "rates" not in content:
            content |= measured_rates()
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for case in cases():
            if (case.model, case.mode, case.micro_batch) in done:
                continue
            if time.monotonic() - started_at > seconds:
                log_line(f"{len(content['cases'])} cases are measured: run this again")
                return
            figures = run_short(
                loaded_config(Path(folder), case),
                lambda loaded: run(loaded, time.time(), saves_state=False),
                RunLength(_STEPS, _WARM_UP),
            )
            entry = asdict(case) | {"step_s": median(figures.step_s), "steps_s": figures.step_s}
            entry |= {"peak_memory_bytes": figures.peak_memory_bytes}
            batch = micro_batch(loaded_config(Path(folder), case).config)
            entry |= {"tokens": figures.work, "label_share": batch.label_share}
            if figures.parts is not None:
                entry["parts_s"] = asdict(figures.parts)
            content["cases"].append(entry)
            log_line(f"{case.name}: {entry['step_s']:.3f} s")
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def measured_rates() -> dict[str, Any]:
    """Return what `paceline doctor` measures on one and on two ranks."""
    command = [sys.executable, "-m", "paceline", "doctor", "--ranks", "2", "--json"]
    started_at = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, profile = time.monotonic() - started_at, read_profile("cpu")
    assert profile is not None
    assert profile.link is not None
    return {
        "doctor_s": seconds,
        "link": asdict(profile.link),
        "rates": [asdict(rates) for rates in profile.rates],
    }


# -- predictions
def read_cpu_rows(paths: Sequence[Path] = RESULTS) -> list[CpuRow]:
    """Return the measured cases of these files as set-ups with rates."""
    return [row for path in paths for row in _read_rows(path)]


def _read_rows(path: Path) -> list[CpuRow]:
    content = json.loads(path.read_text(encoding="utf-8"))
    rates = {each["num_ranks"]: rates_from(each) for each in content["rates"]}
    link = MeasuredLink(**content["link"])
    rows = []
    for entry in content["cases"]:
        hidden, layers, inner = MODELS[entry["model"]]
        dims = LanguageDims(
            hidden,
            layers,
            hidden // 64,
            hidden // 64,
            hidden,
            hidden,
            inner,
            _VOCABULARY,
            tied=True,
        )
        args = {
            "precision": "32",
            "per_device_train_batch_size": entry["micro_batch"],
            "gradient_accumulation_steps": entry["accumulation"],
            "max_length": LENGTH,
        }
        config = Config(
            model="none", dataset="none", train_args=args, parallel={"mode": entry["mode"]}
        )
        chosen = layout(config.parallel, entry["ranks"], entry["mode"])
        setup = setup_of(config, dims, chosen, entry["micro_batch"], LENGTH, entry["label_share"])
        rows.append(
            CpuRow(
                f"{entry['model']} {entry['mode']} {entry['micro_batch']}",
                entry["model"],
                setup,
                rates[entry["ranks"]],
                link,
                entry["step_s"],
            )
        )
    return rows


def leave_out(rows: Sequence[CpuRow], keys: Sequence[str]) -> np.ndarray:
    """Predict the rows of each key with constants fitted to the others."""
    problem, predicted = CpuProblem(rows), np.zeros(len(rows))
    for key in sorted(set(keys)):
        is_left_out = np.array([each == key for each in keys])
        fitted = problem.fit((~is_left_out).astype(float))
        predicted[is_left_out] = problem.predict(fitted)[is_left_out]
    return predicted


def report(rows: Sequence[CpuRow]) -> dict[str, Any]:
    """Return the errors of left-out sizes, left-out modes, of the fit to all, and of the constants
    in the table of devices, which were fitted to the committed cases."""
    measured = np.array([row.step_s for row in rows])
    modes = [row.name.split()[1] for row in rows]
    problem = CpuProblem(rows)
    by_size = leave_out(rows, [row.project for row in rows])
    predictions = {
        "size left out": by_size,
        "mode left out": leave_out(rows, modes),
        "fitted to all": problem.predict(problem.fit(np.ones(len(rows)))),
        "constants of the table": problem.predict(constants()),
    }
    result: dict[str, Any] = {}
    for name, predicted in predictions.items():
        errors = np.abs(predicted / measured - 1)
        result[name] = {
            "cases": len(rows),
            "median": round(100 * float(np.median(errors)), 1),
            "p90": round(100 * float(np.quantile(errors, 0.9)), 1),
        }
    errors = np.abs(by_size / measured - 1)
    result["by_mode"] = {
        mode: round(100 * float(np.median(errors[[each == mode for each in modes]])), 1)
        for mode in dict.fromkeys(modes)
    }
    result["cases"] = [
        {"name": row.name, "measured_s": round(row.step_s, 4), "predicted_s": round(guess, 4)}
        for row, guess in zip(rows, by_size.tolist(), strict=True)
    ]
    return result


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["| | cases | median % | p90 % |", "| --- | ---: | ---: | ---: |"]
    for name in ("size left out", "mode left out", "fitted to all", "constants of the table"):
        each = figures[name]
        lines.append(f"| {name} | {each['cases']} | {each['median']} | {each['p90']} |")
    lines += ["", "| case | measured s | predicted s |", "| --- | ---: | ---: |"]
    for case in figures["cases"]:
        lines.append(f"| {case['name']} | {case['measured_s']} | {case['predicted_s']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure into FILE")
    parser.add_argument("--seconds", type=float, default=200.0, help="stop after (default 200)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write FILE.md")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=RESULTS, help="files of measured cases"
    )
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, options.seconds)
        return 0
    text = table(report(read_cpu_rows(options.results)))
    if options.output is not None:
        title = "# Predicted and measured step times of CPU ranks"
        options.output.with_suffix(".md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

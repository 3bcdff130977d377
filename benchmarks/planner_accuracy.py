"""Compare the planner's step times and memory with published results, each project left out of the
fit of all constants; with `--refit`, write the constants fitted to all projects; with `--rows
FILE`, compare the constants of the table with the results in another file of the same columns."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from assumed.memory_parts import memory_parts
from assumed.memory_total import MemoryKind, memory_bytes, memory_coefficients
from planner_cpu import read_cpu_rows
from planner_fit import FAMILY_PRODUCTS, Array, CpuProblem, MemoryProblem, Prior, TimeProblem
from planner_plot import scatter
from planner_rows import Row, read_rows

from paceline.planner.time.constants import coefficients_of, constants, spread_of
from paceline.planner.time.rates import rates_of
from paceline.planner.time.step import step_time
from paceline.planner.time.work import count_work

DEVICES = Path(__file__).parent.parent / "src/paceline/planner/devices.json"
#: Share of the published results that the stated range of a time covers.
_COVERED = 0.8
#: A choice counts as right within this of the best published rate.
_EQUAL = 0.05
#: Digits of the constants in the file; more would depend on the version of the linear algebra.
_DIGITS = 4


@dataclass(frozen=True)
class LeftOut:
    """Predictions for rows whose project was left out of the fit.

    Args:
        is_known: whether another project published results for the row's chip.
    """

    rows: list[Row]
    predicted: Array
    published: Array
    is_known: Array

    @property
    def logarithms(self) -> Array:
        """The logarithms of published / predicted."""
        return np.asarray(np.log(self.published / self.predicted))


def leave_out(problem: TimeProblem | MemoryProblem) -> LeftOut:
    """Predict the rows of each project with constants fitted to the others."""
    projects = np.array([row.project for row in problem.rows])
    chips = np.array([row.device.chip for row in problem.rows])
    predicted, is_known = np.zeros(len(projects)), np.zeros(len(projects), dtype=bool)
    for project in sorted(set(projects)):
        is_left_out = projects == project
        constants = problem.fit((~is_left_out).astype(float))
        predicted[is_left_out] = problem.predict(constants)[is_left_out]
        others = set(chips[~is_left_out])
        is_known[is_left_out] = [chip in others for chip in chips[is_left_out]]
    return LeftOut(list(problem.rows), predicted, problem.published(), is_known)


def summary(errors: Array) -> dict[str, float | int | None]:
    """Return the number, the median and the 90th percentile of errors, in percent."""
    if len(errors) == 0:
        return {"rows": 0, "median": None, "p90": None}
    return {
        "rows": len(errors),
        "median": round(100 * float(np.median(errors)), 1),
        "p90": round(100 * float(np.quantile(errors, 0.9)), 1),
    }


def by_project(result: LeftOut, errors: Array, selected: Array) -> dict[str, Any]:
    projects = np.array([row.project for row in result.rows])
    return {
        project: summary(errors[selected & (projects == project)])
        for project in sorted(set(projects[selected]))
    }


def spread(logarithms: Array, projects: Sequence[str]) -> float:
    """Return the factor, as a logarithm, within which 80 % of the errors are. A project counts like
    the square root of the number of its rows."""
    counts: dict[str, int] = defaultdict(int)
    for project in projects:
        counts[project] += 1
    weights = np.array([counts[project] ** -0.5 for project in projects])
    order = np.argsort(np.abs(logarithms))
    total = np.cumsum(weights[order])
    return float(np.abs(logarithms)[order][np.searchsorted(total, _COVERED * total[-1])])


def coverage(times: LeftOut) -> float:
    """Return the share of rows within the range that the errors of the other projects give."""
    projects = np.array([row.project for row in times.rows])
    covered = np.zeros(len(projects), dtype=bool)
    for project in set(projects):
        for is_known in (True, False):
            inside = (projects == project) & (times.is_known == is_known)
            others = (projects != project) & (times.is_known == is_known)
            if inside.any() and others.any():
                width = spread(times.logarithms[others], list(projects[others]))
                covered[inside] = np.abs(times.logarithms[inside]) <= width
    return float(covered.mean())


def ranking(times: LeftOut) -> dict[str, int]:
    """Compare the layout with the highest predicted rate with the one with the highest published
    rate, in groups of rows that differ only in their layout and micro-batches."""
    groups = defaultdict(list)
    for row, predicted in zip(times.rows, times.predicted, strict=True):
        groups[row.group].append((row, row.rate(predicted)))
    count = right = 0
    for members in groups.values():
        if len({row.layout for row, _ in members}) < 2:
            continue
        count += 1
        chosen = max(members, key=lambda member: member[1])[0]
        best = max(row.tokens_per_s or 0.0 for row, _ in members)
        right += (chosen.tokens_per_s or 0.0) >= (1 - _EQUAL) * best
    return {"groups": count, "right": right}


def memory_verdicts(rows: Sequence[Row], memory: MemoryProblem) -> dict[str, Any]:
    """Count the rows that ran and are said not to fit, with the constants that were fitted without
    the row's project. Rows whose weights, gradients and moments alone exceed the device contradict
    themselves and are counted apart."""
    projects = sorted({row.project for row in rows})
    measured = np.array([row.project for row in memory.rows])
    refused, impossible = defaultdict(int), 0
    for project in projects:
        constants = memory.fit((measured != project).astype(float))
        for row in (row for row in rows if row.project == project):
            parts, limit = memory_parts(row.setup), row.device.driver_memory_bytes
            if parts.weights + parts.gradients + parts.optimizer > limit:
                impossible += 1
                continue
            coefficients = memory_coefficients(row.setup, "allocated", constants)
            refused[project] += memory_bytes(parts, coefficients) > limit
    count = len(rows) - impossible
    refused_rows = sum(refused.values())
    return {
        "rows": count,
        "said_not_to_fit": refused_rows,
        "share": round(100 * refused_rows / count, 1),
        "by_project": {project: number for project, number in refused.items() if number},
        "state_exceeds_the_device": impossible,
    }


def evaluate() -> tuple[dict[str, Any], LeftOut, LeftOut]:
    """Return all figures as JSON, and the predictions for the plot."""
    rows, omitted = read_rows()
    times = leave_out(TimeProblem([row for row in rows if row.tokens_per_s]))
    memory = MemoryProblem([row for row in rows if row.memory_bytes])
    sizes = leave_out(memory)
    rates = np.abs(times.published / times.predicted - 1)
    bytes_off = np.abs(sizes.predicted / sizes.published - 1)
    known = times.is_known
    everywhere = np.ones(len(sizes.rows), dtype=bool)
    report = {
        "omitted": omitted,
        "tokens_per_s": {
            "chip in another project": summary(rates[known])
            | {"projects": by_project(times, rates, known)},
            "chip in no other project": summary(rates[~known])
            | {"projects": by_project(times, rates, ~known)},
            "all": summary(rates),
        },
        "coverage_of_80_percent_range": round(100 * coverage(times), 1),
        "layouts": ranking(times),
        "memory": summary(bytes_off) | {"projects": by_project(sizes, bytes_off, everywhere)},
        "fits": memory_verdicts(rows, memory),
    }
    return report, times, sizes


def table(report: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    fits, layouts = report["fits"], report["layouts"]
    covered = report["coverage_of_80_percent_range"]
    return "\n".join(
        [
            *error_lines(report),
            "",
            f"- The stated 80 % range covers {covered} % of the rows.",
            f"- In {layouts['right']} of {layouts['groups']} comparisons of layouts, the first"
            " choice is the best one or within 5 % of it.",
            f"- {fits['said_not_to_fit']} of {fits['rows']} runs ({fits['share']} %) are said not"
            f" to fit. {fits['state_exceeds_the_device']} more rows are left out here, because"
            " their training state alone exceeds the device, so that they must have offloaded it.",
            "- Left out: "
            + "; ".join(f"{count} rows ({reason})" for reason, count in report["omitted"].items())
            + ".",
        ]
    )


def error_lines(report: dict[str, Any]) -> list[str]:
    """Return the rows of a table of the errors of times and memory."""
    lines = ["| | rows | median % | p90 % |", "| --- | ---: | ---: | ---: |"]

    def add(name: str, figures: dict[str, Any]) -> None:
        lines.append(f"| {name} | {figures['rows']} | {figures['median']} | {figures['p90']} |")
        for project, values in figures.get("projects", {}).items():
            numbers = f"{values['rows']} | {values['median']} | {values['p90']}"
            lines.append(f"| &nbsp;&nbsp;{project} | {numbers} |")

    for name, figures in report["tokens_per_s"].items():
        add(f"**tokens/s: {name}**", figures)
    add("**memory**", report["memory"])
    return lines


# -- other results
def compare(path: Path) -> dict[str, Any]:
    """Return the errors of the predictions with the constants of the table for the results in a
    file."""
    rows, omitted = read_rows(path)
    timed = [row for row in rows if row.tokens_per_s]
    sized = [row for row in rows if row.memory_bytes]
    seconds = np.array([_seconds(row) for row in timed])
    published = np.array([row.step_s for row in timed])
    errors = np.abs(published / seconds - 1)
    limits = np.array([spread_of(row.device) for row in timed])
    rows_of_chip = [constants().get(f"products: {row.device.chip}") for row in timed]
    known = np.array([value is not None for value in rows_of_chip], dtype=bool)
    memory = np.array([_bytes(row, row.memory_kind) / (row.memory_bytes or 1) - 1 for row in sized])
    fits = [_bytes(row, "allocated") <= row.device.driver_memory_bytes for row in rows]
    times = LeftOut(timed, seconds, published, known)
    sizes = LeftOut(sized, memory, memory, np.ones(len(sized), dtype=bool))
    return {
        "omitted": omitted,
        "tokens_per_s": {
            "chip of the fit": summary(errors[known])
            | {"projects": by_project(times, errors, known)},
            "other chip": summary(errors[~known]) | {"projects": by_project(times, errors, ~known)},
        },
        "coverage_of_80_percent_range": round(
            100 * float((np.abs(np.log(published / seconds)) <= limits).mean()), 1
        ),
        "layouts": ranking(times),
        "memory": summary(np.abs(memory))
        | {"projects": by_project(sizes, np.abs(memory), sizes.is_known)},
        "fits": {"rows": len(rows), "said_not_to_fit": len(rows) - sum(fits)},
    }


def _seconds(row: Row) -> float:
    reached = coefficients_of(row.setup, row.device, constants())
    return step_time(count_work(row.setup, rates_of(row.setup, row.device)), reached).total_s


def _bytes(row: Row, kind: MemoryKind) -> float:
    coefficients = memory_coefficients(row.setup, kind, constants())
    return memory_bytes(memory_parts(row.setup), coefficients)


def compared_table(figures: dict[str, Any]) -> str:
    """Return the figures of :func:`compare` as Markdown."""
    fits, layouts = figures["fits"], figures["layouts"]
    return "\n".join(
        [
            *error_lines(figures),
            "",
            f"- The stated 80 % range covers {figures['coverage_of_80_percent_range']} % of the"
            " rows.",
            f"- In {layouts['right']} of {layouts['groups']} comparisons of layouts, the first"
            " choice is the best one or within 5 % of it.",
            f"- {fits['said_not_to_fit']} of {fits['rows']} runs are said not to fit.",
            *[f"- Left out: {count} rows ({why})" for why, count in figures["omitted"].items()],
        ]
    )


# -- the constants
def refit(path: Path = DEVICES) -> None:
    """Fit all constants to all rows and write them to the table of devices."""
    rows, _ = read_rows()
    times = TimeProblem([row for row in rows if row.tokens_per_s])
    memory = MemoryProblem([row for row in rows if row.memory_bytes])
    constants = {**_entries(times), **_entries(memory)}
    for name, entry in _entries(CpuProblem(read_cpu_rows())).items():
        constants.setdefault(name, entry)
    for family, prior in FAMILY_PRODUCTS.items():
        constants[f"products: {family}"] = _entry(prior.median, prior, 0)
    left_out = leave_out(times)
    projects = np.array([row.project for row in left_out.rows])
    widths = {
        name: round(spread(left_out.logarithms[chosen], list(projects[chosen])), 3)
        for name, chosen in (
            ("fitted chip", left_out.is_known),
            ("other chip", ~left_out.is_known),
        )
    }
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(_table_text(content["about"], constants, widths, content["devices"]), "utf-8")


def _entries(problem: TimeProblem | MemoryProblem | CpuProblem) -> dict[str, dict[str, Any]]:
    fitted = problem.fit(np.ones(len(problem.rows)))
    return {
        name: _entry(fitted[name], prior, problem.rows_of(name))
        for name, prior in problem.priors.items()
    }


def _entry(value: float, prior: Prior, rows: int) -> dict[str, Any]:
    return {
        "value": float(f"{value:.{_DIGITS}g}"),
        "prior": float(f"{prior.median:.{_DIGITS}g}"),
        "width": prior.width,
        "rows": rows,
        "source": prior.source,
    }


def _table_text(
    about: str,
    constants: dict[str, dict[str, Any]],
    widths: dict[str, float],
    devices: list[dict[str, Any]],
) -> str:
    """Return the file with one line for each constant and device, so that changes are readable."""

    def line(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    named = [f"    {line(name)}: {line(entry)}" for name, entry in constants.items()]
    rows = [f"    {line(device)}" for device in devices]
    return (
        f'{{\n  "about": {line(about)},\n  "spread": {line(widths)},\n'
        + '  "constants": {\n'
        + ",\n".join(named)
        + '\n  },\n  "devices": [\n'
        + ",\n".join(rows)
        + "\n  ]\n}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refit", action="store_true", help="write the constants to devices.json")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write FILE.md, .json and .svg")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="other results; nothing is fitted to them"
    )
    options = parser.parse_args()
    if options.rows is not None:
        figures = compare(options.rows)
        print(json.dumps(figures, indent=2) if options.json else compared_table(figures))
        return 0
    if options.refit:
        refit()
        print(f"wrote {DEVICES}", file=sys.stderr)
    report, times, sizes = evaluate()
    text = table(report)
    if options.output is not None:
        _write(options.output, text, report, times, sizes)
    print(json.dumps(report, indent=2) if options.json else text)
    return 0


def _write(output: Path, text: str, report: dict[str, Any], times: LeftOut, sizes: LeftOut) -> None:
    points = [
        (row.project, row.rate(published), row.rate(predicted))
        for row, published, predicted in zip(
            times.rows, times.published, times.predicted, strict=True
        )
    ]
    memory = [
        (row.project, published / 2**30, predicted / 2**30)
        for row, published, predicted in zip(
            sizes.rows, sizes.published, sizes.predicted, strict=True
        )
    ]
    rows = [
        {"id": row.name, "project": row.project, "device": row.device.name}
        | {"published": round(published, 4), "predicted": round(predicted, 4)}
        for row, (_, published, predicted) in zip(times.rows, points, strict=True)
    ]
    svg = scatter(points, "tokens/s per device", memory, "memory in GiB")
    output.with_suffix(".svg").write_text(svg, encoding="utf-8")
    output.with_suffix(".json").write_text(
        json.dumps(report | {"tokens_per_s_of_rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    title = (
        "# Predictions of the planner against published results, each project left out of the fit"
    )
    picture = f"![predicted against published]({output.with_suffix('.svg').name})"
    output.with_suffix(".md").write_text(f"{title}\n\n{text}\n\n{picture}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

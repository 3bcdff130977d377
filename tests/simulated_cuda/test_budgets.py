"""The kernels of simulated steps stay within the budgets of ``budgets.json``."""

from pathlib import Path

import pytest
from step_budgets import CASES, Budget, Case, measure_budgets, read_budgets

#: A budget may be exceeded by this share.
_ALLOWED_GROWTH = 0.1
_FAST = {("full", "zero3"), ("lora", "ddp")}


def find_growth(name: str, budget: Budget, measured: Budget) -> list[str]:
    """Return a line for each operation that launches more kernels, or moves more bytes, than its
    budget allows."""
    lines = []
    for part, operations in measured.items():
        for operation, counts in operations.items():
            allowed = budget[part].get(operation, (0, 0))
            for unit, before, now in zip(("launches", "bytes"), allowed, counts, strict=True):
                if now > before * (1 + _ALLOWED_GROWTH):
                    lines.append(f"{name}, {part}: `{operation}`: {before:g} → {now:g} {unit}")
    return lines


def check_budgets(cases: list[Case], folder: Path) -> None:
    budgets, grown = read_budgets(), []
    for name, measured in measure_budgets(cases, folder).items():
        grown += find_growth(name, budgets[name], measured)
    assert not grown, "\n".join(
        ["a step launches more kernels, or moves more bytes, than budgets.json allows:", *grown]
    )


def test_steps_stay_within_their_budgets(tmp_path: Path) -> None:
    check_budgets([Case(*case) for case in CASES if case in _FAST], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("training", "mode"), [case for case in CASES if case not in _FAST])
def test_every_strategy_stays_within_its_budget(tmp_path: Path, training: str, mode: str) -> None:
    check_budgets([Case(training, mode)], tmp_path)


def test_every_case_has_a_budget() -> None:
    assert set(read_budgets()) == {f"{training}, {mode}" for training, mode in CASES}


@pytest.mark.parametrize("case", ["full, single", "lora, zero3", "full, pipeline"])
def test_loss_launches_few_kernels(case: str) -> None:
    """At most 250 for 8,192 label tokens of a vocabulary of 151,936."""
    operations = read_budgets()[case]["per 1,000 label tokens"].values()
    assert sum(launches for launches, _ in operations) * 8.192 <= 250


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((11, 1100), []),
        ((12, 1000), ["case, per layer: `forward add`: 10 → 12 launches"]),
        ((10, 1101), ["case, per layer: `forward add`: 1000 → 1101 bytes"]),
    ],
)
def test_growth_names_the_operation(counts: tuple[float, int], expected: list[str]) -> None:
    budget: Budget = {"per layer": {"forward add": (10, 1000)}}
    assert find_growth("case", budget, {"per layer": {"forward add": counts}}) == expected


def test_a_new_operation_exceeds_the_budget() -> None:
    measured: Budget = {"optimizer": {"update mul": (1, 8)}}
    assert len(find_growth("case", {"optimizer": {}}, measured)) == 2

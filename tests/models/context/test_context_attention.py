"""Each method of context parallelism computes what one rank computes for the whole row."""

import random

import pytest
import torch
from context_reference import Case, difference, share, whole_row
from ranks import run_ranks

from paceline.models.context.choice import METHODS
from paceline.models.context.place import ContextPlace

#: Seven documents; with 2 and 4 ranks, at least one of them crosses each cut of the row.
DOCUMENTS = (5, 21, 1, 34, 13, 8, 27)
CASES = {
    "documents": Case(DOCUMENTS),
    "one document": Case((61,)),
    "short documents": Case((1,) * 13),
    "grouped heads": Case(DOCUMENTS, key_heads=1),
    "shared key heads": Case(DOCUMENTS, heads=8, key_heads=2),
    "three key heads": Case(DOCUMENTS, heads=12, key_heads=3),
    "narrow values": Case(DOCUMENTS, head_size=12, value_size=8),
    "wide values": Case(DOCUMENTS, key_heads=2, head_size=8, value_size=16),
    "scaling": Case(DOCUMENTS, scaling=0.7),
    "window": Case(DOCUMENTS, key_heads=2, window=6),
    "window of one token": Case(DOCUMENTS, window=1),
    "window of a chunk": Case((90,), window=14),
    "wide window": Case((70, 20), window=60),
    "three tokens": Case((2, 1)),
    "one token": Case((1,)),
    "seven tokens": Case((3, 4), window=2),
}


def shares(world, names, methods):
    place = ContextPlace(world)
    return {
        (name, method): share(CASES[name], place, method) for name in names for method in methods
    }


def check(names: list[str], size: int) -> None:
    results = run_ranks(shares, size, names, METHODS)
    for name in names:
        expected = whole_row(CASES[name])
        for method in METHODS:
            parts = [result[name, method] for result in results]
            assert difference(CASES[name], expected, parts) <= 1e-6, (name, method)


def test_two_ranks_compute_what_one_computes() -> None:
    check(["documents", "window", "grouped heads", "narrow values", "three tokens"], 2)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_case_on_some_ranks(size: int) -> None:
    check([name for name, case in CASES.items() if case.heads % size == 0], size)


def random_case(numbers: random.Random, size: int) -> Case:
    key_heads = numbers.choice([1, 2, 3, 4])
    lengths = [numbers.choice([1, 1, 2, 3, 5, 17, 40, 90]) for _ in range(numbers.randint(1, 9))]
    return Case(
        tuple(lengths),
        key_heads * size * numbers.choice([1, 2]),
        key_heads,
        numbers.choice([4, 8, 16]),
        numbers.choice([4, 8, 20]),
        numbers.choice([None, 1, 2, 5, 16, 33, 64]),
        dtype=torch.float64,
    )


def shares_of(world, cases):
    place = ContextPlace(world)
    return [share(case, place, method) for case in cases for method in METHODS]


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 5])
def test_random_rows_in_double_precision(size: int) -> None:
    numbers = random.Random(size)
    cases = [random_case(numbers, size) for _ in range(40)]
    results = run_ranks(shares_of, size, cases)
    for number in range(len(METHODS) * len(cases)):
        case = cases[number // len(METHODS)]
        parts = [result[number] for result in results]
        method = METHODS[number % len(METHODS)]
        assert difference(case, whole_row(case), parts) <= 1e-13, (case, method)

"""Random numbers depend only on the seed, the purpose and the counters."""

import random

import numpy as np
import pytest
import torch

from paceline.distributed.seeds import derive_seed, seed_everything


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_equal_arguments_give_equal_numbers() -> None:
    seed_everything(42, "step", 3, 1)
    first = draw()
    for _ in range(5):
        draw()
    seed_everything(42, "step", 3, 1)
    assert draw() == first


@pytest.mark.parametrize(
    "arguments",
    [(43, "step", 3, 1), (42, "eval", 3, 1), (42, "step", 1, 3), (42, "step", 31), (42, "step", 3)],
)
def test_different_arguments_give_different_numbers(arguments: tuple[int, str, int]) -> None:
    seed_everything(42, "step", 3, 1)
    first = draw()
    seed_everything(*arguments)
    assert all(
        first_draw != second_draw for first_draw, second_draw in zip(first, draw(), strict=True)
    )


def test_derived_seeds_are_reproducible_and_distinct() -> None:
    assert derive_seed(42, "order", 0) == derive_seed(42, "order", np.int64(0))
    seeds = {
        derive_seed(seed, purpose, counter)
        for seed in range(20)
        for purpose in ("a", "b")
        for counter in range(50)
    }
    assert len(seeds) == 2000
    assert all(0 <= seed < 1 << 63 for seed in seeds)

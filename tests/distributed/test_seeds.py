"""Randomness is a function of (seed, purpose, counters) alone."""

import random

import numpy as np
import pytest
import torch

from paceline.distributed.seeds import derive_seed, seed_everything


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_arguments_give_the_same_draws_whatever_came_before() -> None:
    seed_everything(42, "step", 3, 1)
    first = draws()
    for _ in range(5):
        draws()
    seed_everything(42, "step", 3, 1)
    assert draws() == first


@pytest.mark.parametrize(
    "other",
    [(43, "step", 3, 1), (42, "eval", 3, 1), (42, "step", 1, 3), (42, "step", 31), (42, "step", 3)],
)
def test_other_arguments_give_other_draws(other: tuple[int, str, int]) -> None:
    seed_everything(42, "step", 3, 1)
    first = draws()
    seed_everything(*other)
    assert all(
        first_draw != second_draw for first_draw, second_draw in zip(first, draws(), strict=True)
    )


def test_seeds_are_fixed_for_all_time_and_spread_out() -> None:
    assert derive_seed(42, "order", 0) == derive_seed(42, "order", np.int64(0))
    seeds = {
        derive_seed(seed, purpose, counter)
        for seed in range(20)
        for purpose in ("a", "b")
        for counter in range(50)
    }
    assert len(seeds) == 2000
    assert all(0 <= seed < 1 << 63 for seed in seeds)

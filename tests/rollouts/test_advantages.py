"""Advantages of groups, with rewards that do not apply."""

import math

import numpy as np
import pytest

from paceline.rollouts.advantages import (
    AdvantageRule,
    compute_advantages,
    have_equal_rewards,
    weigh_rewards,
)

NAN = math.nan


def test_weighted_sum_leaves_out_rewards_that_do_not_apply() -> None:
    scores = np.array([[[1.0, 2.0], [NAN, 2.0], [NAN, NAN]]], dtype=np.float32)
    assert weigh_rewards(scores, [1.0, 0.5]).tolist()[0][:2] == [2.0, 1.0]
    assert math.isnan(weigh_rewards(scores, [1.0, 0.5])[0, 2])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (AdvantageRule(scale="none"), [-1.0, 0.0, 1.0]),
        (AdvantageRule(scale="group"), [-1.0 / 1.0001, 0.0, 1.0 / 1.0001]),
        (AdvantageRule(is_leave_one_out=True, scale="none"), [-1.5, 0.0, 1.5]),
        (AdvantageRule(scale="none", clip_range=(0.0, 2.0)), [-2 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_advantages_of_a_group(rule: AdvantageRule, expected: list[float]) -> None:
    rewards = np.array([[1.0, 2.0, 3.0]])
    assert compute_advantages(rewards, rule)[0].tolist() == pytest.approx(expected)


def test_completions_without_reward_have_no_advantage() -> None:
    rewards = np.array([[1.0, 3.0, NAN], [NAN, NAN, NAN], [NAN, 2.0, NAN]])
    for rule in (AdvantageRule(), AdvantageRule(is_leave_one_out=True, scale="none")):
        advantages = compute_advantages(rewards, rule)
        assert np.isfinite(advantages).all()
        assert advantages[0, 0] < 0 < advantages[0, 1]
        assert (advantages[np.isnan(rewards)] == 0).all()
        assert advantages[2, 1] == 0


def test_batch_statistics_are_of_all_groups() -> None:
    rewards = np.array([[0.0, 2.0], [10.0, 10.0]])
    scaled = compute_advantages(rewards, AdvantageRule(scale="batch"))
    spread = np.std([0, 2, 10, 10], ddof=1) + 1e-4
    assert scaled.tolist() == [pytest.approx([-1 / spread, 1 / spread]), [0.0, 0.0]]
    rule = AdvantageRule(is_leave_one_out=True, scale="none", normalizes=True)
    normal = compute_advantages(rewards, rule)
    assert normal.mean() == pytest.approx(0.0)
    assert np.std(normal, ddof=1) == pytest.approx(1.0, abs=1e-3)


def test_equal_rewards_carry_no_signal() -> None:
    rewards = np.array([[0.3, 0.3, 0.3], [0.3, 0.3, 0.4], [0.3, NAN, NAN], [NAN, NAN, NAN]])
    assert have_equal_rewards(rewards).tolist() == [True, False, True, True]


def test_penalties_are_subtracted_before_the_mean() -> None:
    rule = AdvantageRule(is_leave_one_out=True, scale="none")
    advantages = compute_advantages(np.zeros((1, 2)), rule, np.array([[0.5, 0.0]]))
    assert advantages[0].tolist() == [-0.5, 0.5]

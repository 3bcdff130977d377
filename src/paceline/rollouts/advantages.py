"""The statistics of a rollout over whole groups of completions: rewards and advantages.

Every rank computes them from the rewards of all groups, in the order of the prompts, so the result
does not depend on the number of ranks, on the micro-batch size or on accumulation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

#: Added to standard deviations, as in TRL.
_EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageRule:
    """How advantages follow from rewards.

    Args:
        is_leave_one_out: whether the baseline of a completion is the mean reward of the others of
            its group (RLOO; Ahmadian et al., 2024); else it is the mean of the group (GRPO; Shao et
            al., 2024).
        scale: what differences to the mean are divided by: the standard deviation of the rewards of
            the group, of the whole batch, or nothing.
        normalizes: whether advantages get mean 0 and standard deviation 1 over the batch.
        clip_range: smallest and largest reward, or None.
    """

    is_leave_one_out: bool = False
    scale: Literal["group", "batch", "none"] = "group"
    normalizes: bool = False
    clip_range: tuple[float, float] | None = None


def weigh_rewards(scores: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum of the rewards of each completion.

    Args:
        scores: NaN where a reward does not apply, float32 [groups, completions, rewards].

    Returns:
        NaN where no reward applies, float64 [groups, completions].
    """
    values = np.where(np.isnan(scores), 0.0, scores.astype(np.float64))
    has_none = np.isnan(scores).all(axis=-1)
    total: np.ndarray = np.where(has_none, np.nan, values @ np.asarray(weights, dtype=np.float64))
    return total


def compute_advantages(
    rewards: np.ndarray, rule: AdvantageRule, penalties: np.ndarray | None = None
) -> np.ndarray:
    """Return the advantage of each completion; 0 for a completion without a reward.

    Args:
        rewards: result of :func:`weigh_rewards` [groups, completions].
        penalties: values to subtract from the rewards in the shape of the rewards, or None.

    Returns:
        float64 [groups, completions].
    """
    if rule.clip_range is not None:
        rewards = rewards.clip(*rule.clip_range)
    if penalties is not None:
        rewards = rewards - penalties
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # means of no values are NaN
        if rule.is_leave_one_out:
            others = (~np.isnan(rewards)).sum(axis=1, keepdims=True) - 1
            advantages = rewards - (np.nansum(rewards, axis=1, keepdims=True) - rewards) / others
        else:
            advantages = rewards - np.nanmean(rewards, axis=1, keepdims=True)
            if rule.scale == "group":
                advantages = advantages / (deviations(rewards)[:, np.newaxis] + _EPSILON)
            elif rule.scale == "batch":
                advantages = advantages / (_deviation(rewards.reshape(1, -1))[0] + _EPSILON)
        if rule.normalizes:
            spread = _deviation(advantages.reshape(1, -1))[0]
            advantages = (advantages - np.nanmean(advantages)) / (spread + _EPSILON)
    known: np.ndarray = np.nan_to_num(advantages, nan=0.0, posinf=0.0, neginf=0.0)
    return known


def deviations(rewards: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the rewards of each group, 0 with fewer than two rewards
    [groups]."""
    known: np.ndarray = np.nan_to_num(_deviation(rewards), nan=0.0)
    return known


def have_equal_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return whether all rewards of a group are equal, so that it carries no signal, bool
    [groups]."""
    is_equal: np.ndarray = np.isclose(deviations(rewards), 0.0)
    return is_equal


def _deviation(rows: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each row without its NaN, with Bessel's correction."""
    counts = (~np.isnan(rows)).sum(axis=1)
    means = np.nansum(rows, axis=1) / np.maximum(counts, 1)
    squares = np.nansum((rows - means[:, np.newaxis]) ** 2, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread: np.ndarray = np.sqrt(np.where(counts > 1, squares / (counts - 1), np.nan))
    return spread

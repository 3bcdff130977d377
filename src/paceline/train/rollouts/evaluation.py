"""Evaluate a model by the rewards of the completions that it generates."""

from __future__ import annotations

import time

import numpy as np

from paceline.rollouts.decoding import tool_figures
from paceline.train.evaluation import EvalResult
from paceline.train.rollouts.pipeline import RolloutPipeline


def evaluate_rewards(data: RolloutPipeline) -> EvalResult:
    """Return the mean reward of one completion for each validation prompt. Each evaluation draws
    with the same random numbers, and the completions do not depend on the number of ranks. The loss
    is the negative mean reward. A collective."""
    started = time.perf_counter()
    dataset = data.eval_dataset
    assert dataset is not None
    numbers = np.arange(len(dataset))
    groups = data.generate(dataset, numbers, "evaluation", 0, num_completions=1)
    rewards = data.weigh(groups)
    scores = np.concatenate([group.scores for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    metrics = {
        "reward": _mean(rewards),
        "completion_length": float(np.mean([len(each.ids) for each in completions])),
        "truncated": float(np.mean([each.is_truncated for each in completions])),
    }
    if any(each.episode is not None for each in completions):
        calls, failures = tool_figures(completions)
        metrics["tool_calls"], metrics["tool_failures"] = calls, failures or 0.0
    for number, name in enumerate(data.scorer.names):
        metrics[f"rewards/{name}"] = _mean(scores[:, number])
    seconds = time.perf_counter() - started
    return EvalResult(0.0 - metrics["reward"], metrics, len(completions), seconds)


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN without one."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")

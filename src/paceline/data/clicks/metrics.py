"""The area under the ROC curve, exact."""

import numpy as np


def exact_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a random positive row scores above a random negative one, ties counting half:
    the rank-sum statistic of Mann and Whitney (1947) over the number of pairs; nan where one of the
    classes is missing.

    Args:
        labels: 0 or 1, [num_rows].
        scores: any real numbers, [num_rows].
    """
    positive = np.asarray(labels) > 0.5
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, group, sizes = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    # of each group of equal scores, the mean of its ranks from 1 on
    ranks = np.cumsum(sizes) - (sizes - 1) / 2.0
    rank_sum = float(ranks[group][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative)

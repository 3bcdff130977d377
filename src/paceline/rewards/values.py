"""Check what a reward function returned."""

import math
import numbers

from paceline.rewards.protocol import RewardProblem

#: Rewards are float32.
_LARGEST = 3.4028234e38


class BadRewards(Exception):
    """A function returned something else than one reward for each completion."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.problem: RewardProblem = {"code": code, "reason": reason, "line": ""}


def check_values(returned: object, num_completions: int) -> list[float | None]:
    """Return the rewards of the completions; None where the function gave none.

    Raises:
        BadRewards: it is not a list of this length, or a reward is not a finite number.
    """
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        raise BadRewards("rewards-not-a-list", f"a value of type {type(returned).__name__}")
    if len(values) != num_completions:
        raise BadRewards("wrong-number-of-rewards", str(len(values)))
    return [_number(value) for value in values]


def _number(value: object) -> float | None:
    value = _plain(value)
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadRewards("reward-not-a-number", f"{_shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise BadRewards("reward-not-finite", _shown(value))
    return number


def _plain(value: object) -> object:
    """Return an array or tensor, or a number of one, as lists and numbers of Python."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Test that an error is one paragraph with the problem, the allowed values and the fix."""

import pickle

import pytest

from paceline.core.errors import (
    ConfigError,
    FaultError,
    PacelineError,
    RunError,
    StoppedError,
    nearest,
)
from paceline.core.failures import ReportedError
from paceline.core.formatting import counted, significant


def test_paragraph_contains_problem_allowed_values_and_fix() -> None:
    error = ConfigError("`rank: 0` is out of range ", allowed="1 or more", fix="write `rank: 8`")
    assert (
        error.paragraph()
        == str(error)
        == "`rank: 0` is out of range. Allowed: 1 or more. To fix: write `rank: 8`."
    )
    assert RunError("It ended").paragraph() == "It ended."
    assert RunError("Why?", fix="do this:").paragraph() == "Why? To fix: do this:"


@pytest.mark.parametrize(("kind", "code"), [(PacelineError, 1), (RunError, 1), (ConfigError, 2)])
def test_errors_pickle_with_their_exit_codes(kind: type[PacelineError], code: int) -> None:
    error = kind("what", allowed="this", fix="that")
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is kind
    assert restored.exit_code == code
    assert (restored.what, restored.allowed, restored.fix) == ("what", "this", "that")
    assert str(restored) == str(error)


def test_errors_with_additional_arguments_pickle() -> None:
    fault = pickle.loads(pickle.dumps(FaultError("rank 1 hangs", fix="restart it", ranks=[1])))
    assert (fault.ranks, fault.fix) == ([1], "restart it")
    for kind, code in ((ReportedError, 7), (StoppedError, 130)):
        error = kind("rank 1: it failed", code)
        restored = pickle.loads(pickle.dumps(error))
        assert type(restored) is kind
        assert (restored.exit_code, restored.paragraph()) == (code, error.paragraph())


def test_nearest_suggests_similar_names() -> None:
    assert nearest("modle", ["model", "dataset"]) == "model"
    assert nearest("xyz", ["model"]) is None
    assert nearest("modle", ["model"], cutoff=0.95) is None


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2000, "2,000 steps")])
def test_counted_formats_plurals(number: int, text: str) -> None:
    assert counted(number, "step") == text


@pytest.mark.parametrize(
    ("figure", "digits", "text"),
    [(0.01234, 3, "0.0123"), (530.2, 2, "530"), (999.7, 3, "1,000"), (12345, 3, "12,300")],
)
def test_significant_digits_have_no_exponent(figure: float, digits: int, text: str) -> None:
    assert significant(figure, digits) == text

"""Test what the checker of streams finds in small programs."""

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from planted import STREAM_FAULTS
from ranks import run_ranks
from simulated import simulate_values
from stream_order import tracing
from stream_order.checker import Finding, StreamOrderChecker
from stream_programs import PROGRAMS, RIGHT, WRONG

pytestmark = pytest.mark.slow


def findings_of_programs(_env: object) -> dict[str, list[dict[str, str]]]:
    """Run each program once, and those with a planted fault once more; return what was found."""
    simulate_values()
    findings: list[Finding] = []
    tracing.check_streams(StreamOrderChecker(findings.append, tracing.find_site))

    def findings_of(program: Callable[[], None]) -> list[dict[str, str]]:
        findings.clear()
        program()
        result = [asdict(each) for each in findings]
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return result

    correct = (*RIGHT.values(), *WRONG, *PROGRAMS.values())
    result = {program.__name__: findings_of(program) for program in correct}
    for name, program in PROGRAMS.items():
        STREAM_FAULTS[name].replacement.apply()
        result[name] = findings_of(program)
    return result


@pytest.fixture(scope="module")
def findings() -> dict[str, list[dict[str, str]]]:
    (result,) = run_ranks(findings_of_programs, 1, init_process_group=False)
    return result


@pytest.mark.parametrize("name", [*RIGHT, *(each.__name__ for each in PROGRAMS.values())])
def test_nothing_is_found_in_a_right_program(name, findings):
    assert findings[name] == []


@pytest.mark.parametrize(
    ("name", "kind"), [(program.__name__, kind) for program, kind in WRONG.items()]
)
def test_fault_of_a_program_is_found(name, kind, findings):
    assert [finding["kind"] for finding in findings[name]] == [kind], findings[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_fault_planted_in_a_program_is_found(name, findings):
    fault = STREAM_FAULTS[name]
    assert [
        finding
        for finding in findings[name]
        if finding["kind"] == fault.kind and fault.site in f"{finding}"
    ], findings[name]


def test_programs_are_those_of_the_planted_faults():
    assert set(PROGRAMS) == {name for name, fault in STREAM_FAULTS.items() if fault.args is None}

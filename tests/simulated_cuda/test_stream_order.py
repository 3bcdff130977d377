"""Test what the checker of streams finds in small programs."""

from dataclasses import asdict

import pytest
import torch
from ranks import run_ranks
from simulated import simulate_values
from stream_order import tracing
from stream_order.checker import StreamOrderChecker
from stream_programs import RIGHT, WRONG

pytestmark = pytest.mark.slow


def findings_of_programs(_env: object) -> dict[str, list[dict[str, str]]]:
    """Run each program once; return what was found in it."""
    simulate_values()
    findings = []
    tracing.check_streams(StreamOrderChecker(findings.append, tracing.find_site))
    found = {}
    for program in (*RIGHT.values(), *WRONG):
        program()
        found[program.__name__] = [asdict(each) for each in findings]
        findings.clear()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    return found


@pytest.fixture(scope="module")
def findings() -> dict[str, list[dict[str, str]]]:
    (found,) = run_ranks(findings_of_programs, 1, init_process_group=False)
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_right_program(name, findings):
    assert findings[name] == []


@pytest.mark.parametrize(
    ("name", "kind"), [(program.__name__, kind) for program, kind in WRONG.items()]
)
def test_fault_of_a_program_is_found(name, kind, findings):
    assert [finding["kind"] for finding in findings[name]] == [kind], findings[name]

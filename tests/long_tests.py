"""Which tests take long, by durations that were measured: `make test` leaves them to `make soak`.

A mark would not do: of a test with many parameters, some cases stay in `make test`. To measure
again:

    make test PYTEST_ARGS='--record-durations'    # with the tests of `make test`
    make soak PYTEST_ARGS='--record-durations'    # with the other ones

A test that is not in the file, as a new one, is run by `make test`.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

#: {file: {test: seconds}}, with the tests of at least `RECORDED_S`.
DURATIONS = Path(__file__).with_name("durations.json")
RECORDED_S = 1.0
#: A test that takes longer than this belongs to the soak set.
LONG_S = 1.25

Durations = dict[str, dict[str, float]]


def read_durations() -> Durations:
    durations: Durations = json.loads(DURATIONS.read_text())
    return durations


def long_items(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that take long. The shortest test of a file is never among them, so that
    `make test` runs each file."""
    durations = read_durations()
    of_file: dict[str, list[tuple[float, pytest.Item]]] = defaultdict(list)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        of_file[file].append((durations.get(file, {}).get(name, 0.0), item))
    result = []
    for measured in of_file.values():
        shortest_s = min(duration_s for duration_s, _ in measured)
        limit_s = max(LONG_S, shortest_s)
        result += [item for duration_s, item in measured if duration_s > limit_s]
    return result


class DurationRecorder:
    """A plugin of pytest that writes how long the tests of this session took, with fixtures. What
    other tests took stays."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        durations = read_durations()
        for nodeid, seconds in self.seconds.items():
            file, _, name = nodeid.partition("::")
            of_file = durations.setdefault(file, {})
            of_file.pop(name, None)
            if seconds >= RECORDED_S:
                of_file[name] = round(seconds, 1)
        in_order = {
            file: dict(sorted(of_file.items()))
            for file, of_file in sorted(durations.items())
            if of_file
        }
        DURATIONS.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n")

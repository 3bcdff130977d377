"""Print the table of injected faults after the tests."""

import lab
import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lab.ROWS:
        terminalreporter.write_line("")
        terminalreporter.write_line(lab.format_table(lab.format_rows()))
        if lab.is_writing_requested():
            lab.write_table()
            terminalreporter.write_line(f"written: {lab.PAGE}")

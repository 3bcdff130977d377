"""Prints the table of the fault laboratory when its tests have run."""

import lab
import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lab.ROWS:
        terminalreporter.write_line("")
        terminalreporter.write_line(lab.table(lab.cells()))
        if lab.wants_writing():
            lab.write()
            terminalreporter.write_line(f"written: {lab.PAGE}")

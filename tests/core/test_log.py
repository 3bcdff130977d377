"""Test that each notice is printed once and written to the event log once."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core import log
from paceline.core.event_log import EventLog, read_events
from paceline.observe.console import Console

logger = logging.getLogger("paceline.launch.test")


@pytest.fixture(autouse=True)
def fresh_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "info")
    yield
    monkeypatch.undo()
    log.configure_logging()


def test_console_prefixes_warnings_and_respects_the_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, expected in (
        ({}, "info\nwarning: warning\n"),
        ({"quiet": True}, "warning: warning\n"),
        ({"level": "error"}, ""),
        ({"level": "debug"}, "debug\ninfo\nwarning: warning\n"),
    ):
        log.configure_logging(**options)  # type: ignore[arg-type]
        logger.debug("debug")
        logger.info("info")
        logger.warning("warning")
        assert capsys.readouterr().err == expected


def test_notice_is_printed_once_and_logged_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure_logging()
    received: list[dict[str, Any]] = []
    events = EventLog(tmp_path / "events.jsonl", [received.append])
    with log.log_to_events(events):
        logger.warning("a warning")
        logger.info("console only", extra=log.CONSOLE_ONLY)
        logger.debug("debug")
    logger.info("later")
    events.close()
    written = read_events(tmp_path / "events.jsonl")
    assert [(event["level"], event["text"]) for event in written] == [("warning", "a warning")]
    assert received == written
    assert capsys.readouterr().err == "console only\nlater\n"


def test_quiet_console_still_logs_notices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure_logging(quiet=True)
    assert not log.is_shown()
    assert log.is_shown("warning")
    events = EventLog(tmp_path / "events.jsonl", [Console()])
    with log.log_to_events(events):
        logger.info("info")
        logger.warning("warning")
        events.emit({"type": "step", "step": 1, "loss": 1.0})
    events.close()
    assert [event.get("text") for event in read_events(tmp_path / "events.jsonl")] == [
        "info",
        "warning",
        None,
    ]
    assert capsys.readouterr().err == "warning: warning\n"


def test_records_notices_for_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure_logging()
    with log.recorded_notices() as recorder:
        log.log_notices(logger, [("info", "50 % of it"), ("warning", "careful")])
        logger.info("strategy: ddp", extra=log.CONSOLE_ONLY)
    assert recorder.notices == [("info", "50 % of it"), ("warning", "careful")]
    assert recorder.messages == ["50 % of it", "careful", "strategy: ddp"]
    assert capsys.readouterr().err == "50 % of it\nwarning: careful\nstrategy: ddp\n"
    log.hide_on_console(recorder.messages)
    logger.warning("careful")
    logger.warning("new")
    assert capsys.readouterr().err == "warning: new\n"


def test_other_ranks_print_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    log.mute_console()
    logger.warning("warning")
    logger.error("error")
    assert capsys.readouterr().err == "error: error\n"


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure_logging()
    logger.info("a\x1b[2Jb")
    assert "\x1b" not in capsys.readouterr().err


def test_warnings_are_printed_last(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure_logging()
    with log.warnings_last() as print_warnings:
        logging.getLogger("paceline.test").warning("the batch is large")
        log.log_notices(logger, [("warning", "no validation data"), ("info", "two ranks")])
        print_warnings()
        logging.getLogger("paceline.test").warning("at once")
        assert capsys.readouterr().err.splitlines() == [
            "two ranks",
            "warning: the batch is large",
            "warning: no validation data",
            "warning: at once",
        ]
    with contextlib.suppress(KeyboardInterrupt), log.warnings_last():
        logger.warning("not lost")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "warning: not lost\n"

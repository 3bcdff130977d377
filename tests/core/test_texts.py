"""Test texts with values: how templates are filled, and what errors and notices carry."""

import json
import logging
import pickle
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.errors import ConfigError, FaultError, read_error, write_error
from paceline.core.event_log import EventLog, read_events
from paceline.core.failures import ExitRecord, classify
from paceline.core.log import Notice, log_to_events
from paceline.core.texts import UserText, fill
from paceline.messages.event_text import event_text


def test_fills_fields_and_nothing_else() -> None:
    values = {"key": "{steps}", "steps": 1, "rows": 2000}
    assert fill("`{key}` {steps:step}, {rows:row}", values) == "`{steps}` 1 step, 2,000 rows"
    assert fill("{0: 0.9} {other} {label: YOURS}", values) == "{0: 0.9} {other} {label: YOURS}"


def test_errors_keep_code_and_values() -> None:
    error = FaultError(
        "{path} failed", code="failed-path", fix="move {path}", ranks=[1], path=Path("a"), n=None
    )
    assert (error.what, error.fix) == ("a failed", "move a")
    assert error.values == {"path": "a", "n": None}
    assert error.printed() == "a failed. To fix: move a. [failed-path]"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.record(), copy.ranks, str(copy)) == (error.record(), [1], str(error))
    ended = ExitRecord.from_json(
        json.loads(json.dumps(ExitRecord.failed(classify(error)).as_json()))
    )
    assert (ended.cause.code, ended.cause.values) == ("failed-path", error.values)


def test_command_records_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("PACELINE_ERROR_FILE", str(file))
    assert main(["help", "unknown-kye"]) == 2
    assert capsys.readouterr().err.endswith("did you mean `unknown-key`? [unknown-code]\n")
    error = read_error(file, 2)
    assert isinstance(error, ConfigError)
    assert (error.code, error.values) == ("unknown-code", {"code_name": "unknown-kye"})
    file.write_text('{"code": "half')
    assert read_error(file, 2) is None
    write_error(error, str(tmp_path / "absent" / "error.json"))  # the folder may be gone


def test_notices_keep_code_and_values(tmp_path: Path) -> None:
    text = UserText("{n:row} of {name} dropped: 50%s", code="rows-dropped-here", n=2, name="a")
    assert text == "2 rows of a dropped: 50%s"
    assert pickle.loads(pickle.dumps(text)).values == {"n": 2, "name": "a"}
    notice = Notice("warning", text)
    stored = Notice.from_json(json.loads(json.dumps(notice.as_json())))
    assert isinstance(stored.message, UserText)
    assert (stored, stored.message.code) == (notice, "rows-dropped-here")
    assert Notice.from_json(["info", "plain"]) == Notice("info", "plain")
    events = EventLog(tmp_path / "events.jsonl")
    with log_to_events(events):
        logging.getLogger("paceline.here").warning(text)
        logging.getLogger("paceline.here").info("%d plain", 3)
    events.close()
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["code"], first["values"]) == ("rows-dropped-here", {"n": 2, "name": "a"})
    assert (second["text"], "code" in second) == ("3 plain", False)
    _, shown = event_text(first)
    assert isinstance(shown, UserText)
    assert shown.values == text.values

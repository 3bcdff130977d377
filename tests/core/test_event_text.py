"""Test the text of events."""

from typing import Any

import pytest

from paceline.messages.event_text import event_text


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (
            {"type": "resume", "step": 1200, "path": "x/step-1200"},
            "info",
            "resumed at step 1,200 from x/step-1200",
        ),
        (
            {"type": "fault", "ranks": [1], "hosts": ["b"], "reason": "killed", "restart": 2},
            "error",
            "fault, rank 1 on b: killed (restart 2)",
        ),
        (
            {
                "type": "run_end",
                "status": "failed",
                "step": 5,
                "reason": "out of memory",
                "wall_s": 65,
            },
            "error",
            "failed at step 5 after 1 min 05 s: out of memory",
        ),
        (
            {"type": "checkpoint", "step": 3, "error": "disk full"},
            "warning",
            "no checkpoint at step 3: disk full",
        ),
        (
            {"type": "rollback", "step": 9, "to_step": 5, "loss": 80.0, "median": 2.0},
            "warning",
            "step 9: the loss spiked to 80.00 (median 2.0000); rolled back to step 5",
        ),
        ({"type": "notice", "level": "warning", "text": "a\x1b[2J"}, "warning", "a\ufffd[2J"),
        ({"type": "straggler", "text": "rank 1 is slow"}, "warning", "rank 1 is slow"),
    ],
)
def test_describes_each_event(event: dict[str, Any], level: str, text: str) -> None:
    assert event_text(event) == (level, text)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "eval", "metrics": 5},
        {"type": "hang"},
        {"type": "memory", "ranks": 3},
        {"type": ["x"]},
        {"type": "of another version"},
    ],
)
def test_shows_unknown_events_unchanged(event: dict[str, Any]) -> None:
    level, text = event_text(event)
    assert level == "info"
    assert str(event["type"]) in text

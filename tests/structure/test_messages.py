"""Test that messages.txt lists the current messages for users."""

from user_messages import SNAPSHOT, collect


def test_snapshot_is_up_to_date() -> None:
    assert SNAPSHOT.read_text(encoding="utf-8") == collect(), (
        "messages have changed: run `python tests/structure/user_messages.py`, then review the diff"
    )

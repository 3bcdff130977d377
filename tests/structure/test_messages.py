"""Messages for users, in one file that a reviewer can read."""

from user_messages import SNAPSHOT, collect


def test_the_snapshot_is_fresh() -> None:
    assert SNAPSHOT.read_text(encoding="utf-8") == collect(), (
        "messages have changed: run `python tests/structure/user_messages.py`, and read its diff"
    )

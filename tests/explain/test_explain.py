"""`paceline explain`: what is told is what happened on real ranks; wrong words are refused; no
process is left."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import end_with_signal, parse, run, start

from paceline.commands.explain import make_options
from paceline.core.errors import ConfigError
from paceline.distributed.collectives.schedules import ALGORITHMS, sent
from paceline.explain.run import TOPICS, ExplainOptions, Recording
from paceline.explain.topics import collective as topic

FIXED = {"algorithm", "ranks", "elements", "steps", "bytes_sent", "messages_sent", "result_ok"}


def _replay(story: dict[str, Any]) -> None:
    """Follow the messages from the start on: each state told must be what they lead to."""
    adds = {"scatter-reduce", "gather", "reduce", "fold", "halving"}
    for number, step in enumerate(story["steps"]):
        before, after = story["states"][number], [list(row) for row in story["states"][number]]
        for send in step["sends"]:
            for at, (start_, stop) in enumerate(story["segments"]):
                if send["start"] <= start_ and stop <= send["stop"]:
                    value = before[send["from"]][at]
                    after[send["to"]][at] = (
                        value + after[send["to"]][at] if step["phase"] in adds else value
                    )
        assert after == story["states"][number + 1], (story["algorithm"], number)


def test_the_command_prints_json_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "ring.html"
    out = run(
        "all-reduce",
        "--ranks",
        "5",
        "--elements",
        "10",
        "--json",
        f"--output={page}",
        verb="explain",
    ).stdout
    story = json.loads(out)
    assert set(story) == FIXED
    assert (story["algorithm"], story["ranks"], story["elements"], story["result_ok"]) == (
        "ring",
        5,
        10,
        True,
    )
    assert [step["phase"] for step in story["steps"]] == ["scatter-reduce"] * 4 + ["all-gather"] * 4
    assert [step["step"] for step in story["steps"]] == [0, 1, 2, 3] * 2
    for step in story["steps"]:
        assert set(step) == {"phase", "step", "sends"}
        assert all(set(send) == {"from", "to", "chunk", "bytes"} for send in step["sends"])
        assert all(
            send["to"] == (send["from"] + 1) % 5 and send["bytes"] == 8 for send in step["sends"]
        )
    assert story["bytes_sent"] == [64] * 5  # 2 · 4/5 · 40 bytes
    assert story["messages_sent"] == [8] * 5
    text = page.read_text(encoding="utf-8")
    data = json.loads(
        text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )
    assert data["kind"] == "chunks"
    _replay({**story, **data})
    assert {value for row in data["states"][-1] for value in row} == {31}
    assert len(data["captions"]) == len(data["states"]) == 9
    for label in ("Start", "Back", "Play", "Next", "Step", "Speed"):
        assert label in text
    # The page loads nothing.
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<link" not in text
    assert "src=" not in text


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "elements"),
    [
        ("all-reduce", "halving", 3, 5),
        ("all-reduce", "tree", 4, 3),
        ("all-reduce", "naive", 3, 1),
        ("broadcast", "ring", 3, 2),
        ("broadcast", "tree", 3, 4),
        ("all-reduce", "ring", 1, 4),
    ],
)
def test_every_state_follows_from_the_messages(
    collective: str, algorithm: str, ranks: int, elements: int
) -> None:
    recording = topic.record(ExplainOptions(collective, ranks, elements, algorithm))
    story = recording.content
    assert recording.is_correct
    assert story["result_ok"]
    _replay({**story, **recording.player})
    formula = sent(algorithm, ranks, elements, 4, collective)
    assert story["bytes_sent"] == [rank.bytes for rank in formula]
    assert story["messages_sent"] == [rank.messages for rank in formula]
    text = recording.text()
    assert text.count("→") == sum(story["messages_sent"])
    assert "equal to the backend's" in text


def test_text_cannot_end_the_script() -> None:
    recording = Recording(
        title="</script><b>",
        about="a < b",
        is_correct=True,
        facts=[("x", "<i>")],
        lines=["<pre>"],
        captions=["</script>"],
        player={"kind": "chunks"},
        content={},
    )
    page = recording.page()
    assert page.count("</script>") == 2
    assert "<i>" not in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        (["all-reduc"], "all-reduce, broadcast, ddp, zero, dp"),
        (["all-reduce", "--ranks", "0"], "1 to 16"),
        (["all-reduce", "--ranks", "-2"], "1 to 16"),
        (["all-reduce", "--elements", "0"], "1 to 10,000"),
        (["all-reduce", "--algorithm", "rign"], "did you mean `ring`"),
        (["broadcast", "--algorithm", "halving"], "ring, tree, naive"),
        (["ddp", "--ranks", "1"], "2 to 16"),
        (["zero", "--elements", "5"], "--ranks"),
        (["all-reduce", "--output", "/no/such/folder/page.html"], "an existing folder"),
    ],
)
def test_wrong_arguments(tokens: list[str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_options(parse("explain", *tokens))
    assert allowed in str(caught.value)


def test_wrong_arguments_end_with_2_before_the_start() -> None:
    assert "1 to 16" in run("all-reduce", "--ranks", "0", verb="explain", expect=2).stderr
    assert ", ".join(TOPICS) in run("everything", verb="explain", expect=2).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process table")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_ends_every_rank(number: signal.Signals) -> None:
    process = start("zero", "--ranks", "3", verb="explain", start_new_session=True)
    err = end_with_signal(process, number, 3)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "all processes have ended" in err


def test_algorithms_have_a_text_each() -> None:
    for collective, known in ALGORITHMS.items():
        for algorithm in known:
            assert topic.about(collective, algorithm, 3)

"""Test that `paceline explain` shows what real ranks did, rejects invalid arguments, and leaves no
process behind."""

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


def _check_states(content: dict[str, Any]) -> None:
    """Apply the messages step by step, and compare the result with each recorded state."""
    reducing_phases = {"scatter-reduce", "gather", "reduce", "fold", "halving"}
    for number, step in enumerate(content["steps"]):
        before, after = content["states"][number], [list(row) for row in content["states"][number]]
        for send in step["sends"]:
            for index, (start_, stop) in enumerate(content["segments"]):
                if send["start"] <= start_ and stop <= send["stop"]:
                    value = before[send["from"]][index]
                    after[send["to"]][index] = (
                        value + after[send["to"]][index]
                        if step["phase"] in reducing_phases
                        else value
                    )
        assert after == content["states"][number + 1], (content["algorithm"], number)


def test_command_prints_json_and_writes_a_page(tmp_path: Path) -> None:
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
    content = json.loads(out)
    assert set(content) == FIXED
    assert (content["algorithm"], content["ranks"], content["elements"], content["result_ok"]) == (
        "ring",
        5,
        10,
        True,
    )
    assert [step["phase"] for step in content["steps"]] == ["scatter-reduce"] * 4 + [
        "all-gather"
    ] * 4
    assert [step["step"] for step in content["steps"]] == [0, 1, 2, 3] * 2
    for step in content["steps"]:
        assert set(step) == {"phase", "step", "sends"}
        assert all(set(send) == {"from", "to", "chunk", "bytes"} for send in step["sends"])
        assert all(
            send["to"] == (send["from"] + 1) % 5 and send["bytes"] == 8 for send in step["sends"]
        )
    assert content["bytes_sent"] == [64] * 5  # 2 · 4/5 · 40 bytes
    assert content["messages_sent"] == [8] * 5
    text = page.read_text(encoding="utf-8")
    data = json.loads(
        text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )
    assert data["kind"] == "chunks"
    _check_states({**content, **data})
    assert {value for row in data["states"][-1] for value in row} == {31}
    assert len(data["captions"]) == len(data["states"]) == 9
    for label in ("Start", "Back", "Play", "Next", "Step", "Speed"):
        assert label in text
    # The page loads no other resources.
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
def test_messages_lead_to_every_recorded_state(
    collective: str, algorithm: str, ranks: int, elements: int
) -> None:
    recording = topic.record(ExplainOptions(collective, ranks, elements, algorithm))
    content = recording.content
    assert recording.is_correct
    assert content["result_ok"]
    _check_states({**content, **recording.player})
    formula = sent(algorithm, ranks, elements, 4, collective)
    assert content["bytes_sent"] == [rank.bytes for rank in formula]
    assert content["messages_sent"] == [rank.messages for rank in formula]
    text = recording.text()
    assert text.count("→") == sum(content["messages_sent"])
    assert "equal to the backend's" in text


def test_page_escapes_text() -> None:
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
def test_rejects_invalid_arguments(tokens: list[str], allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_options(parse("explain", *tokens))
    assert allowed in str(caught.value)


def test_invalid_arguments_exit_with_2() -> None:
    assert "1 to 16" in run("all-reduce", "--ranks", "0", verb="explain", expect=2).stderr
    assert ", ".join(TOPICS) in run("everything", verb="explain", expect=2).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process table")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signal_ends_all_ranks(number: signal.Signals) -> None:
    process = start("zero", "--ranks", "3", verb="explain", start_new_session=True)
    stderr = end_with_signal(process, number, 3)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "all processes have ended" in stderr


def test_every_algorithm_has_a_description() -> None:
    for collective, known in ALGORITHMS.items():
        for algorithm in known:
            assert topic.about(collective, algorithm, 3)

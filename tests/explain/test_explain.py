"""Test that `paceline explain` shows what real ranks did, rejects invalid arguments, and leaves no
process behind."""

import json
import signal
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from commands import end_with_signal, parse, run, start

from paceline.commands.explain import make_options
from paceline.core.errors import ConfigError
from paceline.explain.catalog import TOPICS, ExplainOptions
from paceline.explain.run import record
from paceline.explain.text import render_text
from paceline.explain.topics.collective import about
from paceline.strategies.reducers.all_reduce.schedules import ALGORITHMS, sent


def _check_states(content: dict[str, Any]) -> None:
    """Apply the messages step by step, and compare the result with each recorded state."""
    reducing_phases = {"scatter-reduce", "gather", "reduce", "fold", "halving"}
    for number, frame in enumerate(content["frames"][1:]):
        before, after = content["states"][number], [list(row) for row in content["states"][number]]
        for message in frame["messages"]:
            for index in range(*message["cells"]):
                value = before[message["source"]][index]
                after[message["target"]][index] = (
                    value + after[message["target"]][index]
                    if frame["phase"] in reducing_phases
                    else value
                )
        assert after == content["states"][number + 1], (content["algorithm"], number)


def test_command_prints_json_and_writes_a_page_and_a_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "ring.html", tmp_path / "ring.svg"
    out = run(
        "all-reduce",
        "--ranks",
        "5",
        "--elements",
        "10",
        "--json",
        f"--output={page}",
        f"--svg={picture}",
        verb="explain",
    ).stdout
    content = json.loads(out)
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
    _check_states(content)
    assert {value for row in content["states"][-1] for value in row} == {31}
    text = page.read_text(encoding="utf-8")
    data = json.loads(
        text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )
    for of_language in (data["en"], data["zh"]):
        assert {name: len(of_language[name]) for name in ("captions", "wide", "narrow")} == {
            "captions": 9,
            "wide": 9,
            "narrow": 9,
        }
    for label in ("Start", "Back", "Play", "Next", "Step", "Speed"):
        assert label in text
    assert ET.parse(picture).getroot().tag.endswith("svg")


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
    recording = record(ExplainOptions(collective, ranks, elements, algorithm))
    content = json.loads(json.dumps(recording.content()))
    assert content["result_ok"]
    _check_states(content)
    formula = sent(algorithm, ranks, elements, 4, collective)
    assert content["bytes_sent"] == [rank.bytes for rank in formula]
    assert content["messages_sent"] == [rank.messages for rank in formula]
    text = render_text(recording)
    assert text.count("→") == sum(content["messages_sent"])
    assert "check: same bits as the backend's collective: ok" in text


def test_topics_are_listed_in_reading_order(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    assert main(["explain", "--json"]) == 0
    topics = json.loads(capsys.readouterr().out)["topics"]
    assert [entry["name"] for entry in topics] == list(TOPICS)
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(TOPICS)
    assert main(["explain", "--ranks", "2"]) == 2


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [
        (["all-reduc"], ", ".join(TOPICS)),
        (["dp"], "use `data-parallel`, its new name"),
        (["all-reduce", "--ranks", "0"], "1 to 16"),
        (["all-reduce", "--ranks", "-2"], "1 to 16"),
        (["all-reduce", "--elements", "0"], "1 to 10,000"),
        (["all-reduce", "--algorithm", "rign"], "did you mean `ring`"),
        (["broadcast", "--algorithm", "halving"], "ring, tree, naive"),
        (["ddp", "--ranks", "1"], "2 to 16"),
        (["zero", "--elements", "5"], "--ranks"),
        (["memory", "--ranks", "2"], "--output, --svg, --json"),
        (["hybrid", "--ranks", "6"], "4, 8, 12 or 16"),
        (["parameter-server", "--algorithm", "asink"], "did you mean `async`"),
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
            assert about(collective, algorithm, 3)

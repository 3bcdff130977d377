"""Test the record format of `paceline explain`, and the text, page and pictures made from it. No
rank is started."""

import json
import xml.etree.ElementTree as ET

from paceline.explain.draw import NARROW, WIDE, Drawing, draw_picture
from paceline.explain.page import render_page
from paceline.explain.record import (
    Cell,
    Check,
    Collective,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    Span,
    check_traffic,
    on_step_clock,
    stack_lanes,
)
from paceline.explain.text import render_text

_SVG = "{http://www.w3.org/2000/svg}"


def _recording(title: str = "Two ranks", caption: str = "Rank 0 sends.") -> Recording:
    start = ((DrawnRow("", (Cell("a", ranks=(0,)),)),), (DrawnRow("", (Cell("b", ranks=(1,)),)),))
    end = ((DrawnRow("", (Cell("a"),)),), (DrawnRow("", (Cell("a+b", tone="new", ranks=(0, 1)),)),))
    frames = (
        Frame("Start.", start, time_s=0.0),
        Frame(
            caption, end, messages=(DrawnMessage(0, 1, "a", 8, row=0, cells=(0, 1)),), time_s=0.5
        ),
        Frame("Sum.", end, collectives=(Collective("all-reduce", (0, 1), "sum", 4),), time_s=1.0),
    )
    return Recording(
        topic="test",
        title=title,
        about="About.",
        actors=("rank 0", "rank 1"),
        frames=frames,
        checks=(check_traffic(frames, [12, 4]),),
        facts=(("Ranks", "2"),),
        spans=(
            Span(0, "network", "send", "a", 0.0, 1.0),
            Span(1, "network", "send", "b", 0.2, 0.5),
        ),
        figures={"ranks": 2},
    )


def test_traffic_of_messages_and_collectives_is_compared_with_the_counters() -> None:
    recording = _recording()
    assert recording.bytes_sent == [12, 4]
    assert recording.is_correct
    assert not check_traffic(recording.frames, [12, 5]).passed


def test_json_has_frames_spans_figures_and_checks() -> None:
    content = json.loads(json.dumps(_recording().content()))
    assert content["ranks"] == 2
    assert content["result_ok"] is True
    assert content["frames"][1]["messages"][0]["size_bytes"] == 8
    assert [span["kind"] for span in content["spans"]] == ["send", "send"]


def test_text_shows_each_frame_and_names_failed_checks() -> None:
    recording = _recording()
    text = render_text(recording)
    assert "rank 0 → rank 1   a   8 B" in text
    assert "all-reduce of rank 0, rank 1" in text
    failed = Recording(**{**vars(recording), "checks": (Check.equal("sum", 1, 2),)})
    assert "check: sum: FAILED (shown 1, recorded 2)" in render_text(failed)


def test_spans_of_a_lane_that_overlap_are_in_separate_rows() -> None:
    spans = [
        Span(0, "network", "send", "a", 10.0, 12.0),
        Span(0, "network", "send", "b", 11.0, 13.0),
        Span(0, "network", "send", "c", 12.5, 14.0),
    ]
    moved, begin = on_step_clock(spans)
    assert begin == 10.0
    lanes = stack_lanes(moved)
    assert [[span.label for span in row] for row in lanes[0][2]] == [["a", "c"], ["b"]]


def test_drawings_are_well_formed_and_fit_a_phone() -> None:
    recording = _recording(caption="a < b & c")
    for width in (WIDE, NARROW):
        drawing = Drawing(recording, width)
        assert drawing.width <= width
        for number in range(len(recording.frames)):
            root = ET.fromstring(drawing.frame(number))
            assert float(root.attrib["width"]) == width
    # The message has an arrow and a chip; the collective a mark at each rank.
    assert len(ET.fromstring(drawing.frame(1)).findall(f".//{_SVG}g[@class='chip']")) == 1
    assert len(ET.fromstring(drawing.frame(2)).findall(f".//{_SVG}circle")) == 2


def test_picture_has_its_own_background_and_both_color_schemes() -> None:
    root = ET.fromstring(draw_picture(_recording()))
    assert root.find(f"{_SVG}rect[@class='background']") is not None
    style = root.find(f"{_SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    assert "Ranks: 2" in "".join(root.itertext())


def test_page_escapes_text_and_loads_nothing() -> None:
    page = render_page(_recording("</script><b>", "</script><i>"))
    assert page.count("</script>") == 3  # the data, the language and the player
    assert "<i>" not in page
    assert "<b>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<link" not in page
    assert "src=" not in page

"""Nulls in tool calls and tools: those that the data has are kept, those that Arrow adds to the
structures of a table are not."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_tokens import MODEL, loss_segments, save

from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.sources.hub import HubDataset
from paceline.data.sources.readers import read_file
from paceline.data.streaming.tables import open_table
from paceline.data.text.formats import RowConverter
from paceline.data.text.preferences import PairConverter
from paceline.models.builtin import resolve_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_row(name: str, arguments: Any, properties: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "a"},
        ],
        "tools": [{"type": "function", "function": function}],
    }


ARGUMENTS = {"city": "Bonn", "unit": None, "days": [1, None], "place": {"street": None}}
PROPERTIES = {"unit": {"type": "string", "default": None, "enum": ["c", None]}}
ROW = make_row("weather", ARGUMENTS, PROPERTIES)


def with_json_text(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the tools and the arguments as JSON text."""
    call = row["messages"][1]["tool_calls"][0]["function"]
    text = {**call, "arguments": json.dumps(call["arguments"])}
    messages = [
        row["messages"][0],
        {**row["messages"][1], "tool_calls": [{"type": "function", "function": text}]},
        *row["messages"][2:],
    ]
    return {"messages": messages, "tools": json.dumps(row["tools"])}


def as_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    call = row["messages"][1]["tool_calls"][0]["function"]
    return {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": json.dumps([row["tools"][0]["function"]]),
    }


@pytest.mark.parametrize("convert", [dict, with_json_text, as_sharegpt])
def test_nulls_of_the_data_are_kept(convert: Any, tmp_path: Path) -> None:
    row = convert(ROW)
    sample = RowConverter("data")(row)
    calls = (sample.messages or [])[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == ARGUMENTS
    assert (sample.tools or [])[0]["function"]["parameters"]["properties"] == PROPERTIES  # type: ignore[index,call-overload]
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    config = Config(
        model=MODEL, dataset=save(tmp_path / "a.jsonl", [row]), chat_template=str(template)
    )
    segments = loss_segments(prepare_tokens(config, "sft", resolve_model))
    assert json.dumps({"name": "weather", "arguments": ARGUMENTS}) in segments[1][1]
    assert '"default": null' in segments[0][1]


def test_nulls_in_pairs_and_results_of_tools() -> None:
    call = ROW["messages"][1]
    row = {"prompt": [ROW["messages"][0]], "chosen": [call], "rejected": [ROW["messages"][3]]}
    sample = PairConverter("data")({**row, "tools": ROW["tools"]})
    assert (sample.messages or [])[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    result = {"role": "tool", "content": {"rain": None}}
    messages = [*ROW["messages"][:2], result, ROW["messages"][3]]
    sample = RowConverter("data")({**ROW, "messages": messages})
    assert (sample.messages or [])[2]["content"] == '{"rain": null}'


OTHER = make_row("news", {"topic": "rain"}, {"topic": {"type": "string"}})
FIRST = make_row("weather", {"city": "Bonn"}, {"city": {"type": "string"}})


def read_all(path: Path, kind: str) -> list[Any]:
    if kind == "streaming":
        table = open_table(path)
        assert table is not None
        return [table.row(number)[1] for number in range(2)]
    return [row for _, row in read_file(path)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "streaming"])
def test_nulls_that_arrow_adds_are_removed(kind: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{**FIRST, "note": None}, {**OTHER, "note": "x"}])
    path = tmp_path / ("a.arrow" if kind == "arrow" else "a.parquet")
    if kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    rows = read_all(path, kind)
    assert rows[0]["note"] is None  # a cell of the table, not a key of a structure
    for row, expected in zip(rows, (FIRST, OTHER), strict=True):
        sample = RowConverter("data", ignore_columns=["note"])(row)
        direct = RowConverter("data")(expected)
        assert sample.messages == direct.messages
        assert sample.tools == direct.tools


def test_nulls_that_the_hub_library_adds_are_removed(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [FIRST, OTHER]
    dataset = HubDataset("a/b", None, "train")
    dataset._loaded = Dataset(pa.Table.from_pylist(rows))
    for row, expected in zip(dataset.rows(), rows, strict=True):
        sample, direct = RowConverter("data")(row), RowConverter("data")(expected)
        assert (sample.messages, sample.tools) == (direct.messages, direct.tools)

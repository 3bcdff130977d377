"""Rows that no model must be trained on are found once for each set of columns and once for each
text, and a kind of samples that does not exist is an error."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prepared_tokens import save

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.encoding.prepare import prepare_tokens
from paceline.data.text import formats, refused_rows
from paceline.models.builtin import resolve_model


def make_rows(kind: str, number: int) -> list[dict[str, Any]]:
    """Return rows of two sets of columns. Each has one question and one earlier question."""
    rows = []
    for n in range(number):
        turns = [
            {"role": "user", "content": f"Is {n} < {n + 1}?"},
            {"role": "assistant", "content": "Is it <b>so</b>?"},
            {"role": "user", "content": f"{n} <= {n}, so?"},
        ]
        chosen = [*turns, {"role": "assistant", "content": f"Yes, {n}"}]
        other = [*turns, {"role": "assistant", "content": f"No, {n}"}]
        row: dict[str, Any] = {"chosen": chosen, "rejected": other}
        if kind == "sft":
            row = {"messages": chosen}
        rows.append({**row, "id": n} if n % 2 else row)
    return rows


@pytest.mark.parametrize(("kind", "task"), [("sft", "sft"), ("pairs", "dpo")])
def test_refusals_are_decided_once(
    kind: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: Counter[tuple[object, ...]] = Counter()
    texts: Counter[str] = Counter()
    find_columns, find_text = formats.find_refused_columns, refused_rows.find_placeholder

    def count_columns(names: Any) -> Any:
        columns[tuple(names)] += 1
        return find_columns(names)

    def count_text(text: str) -> str | None:
        texts[text] += 1
        return find_text(text)

    monkeypatch.setattr(formats, "find_refused_columns", count_columns)
    monkeypatch.setattr(refused_rows, "find_placeholder", count_text)
    path = save(tmp_path / "rows.jsonl", make_rows(kind, 700))  # three chunks
    config = Config(model="builtin:qwen2-micro", dataset=path, task=task)
    assert prepare_tokens(config, kind, resolve_model, workers=1).counts.kept == 700
    assert list(columns.values()) == [1, 1]
    assert (set(texts.values()), len(texts)) == ({1}, 1400)


def test_name_of_a_kind_that_does_not_exist(tmp_path: Path) -> None:
    config = Config(
        model="builtin:qwen2-micro", dataset=save(tmp_path / "a.jsonl", [{"text": "a"}])
    )
    for name in ("triplet", f"{__file__}:nothing", f"{__file__}:Path"):
        with pytest.raises(ConfigError) as raised:
            prepare_tokens(config, name, resolve_model)
        assert name in raised.value.what
        assert "pairs, answers, reward" in str(raised.value.allowed)

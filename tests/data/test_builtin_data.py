"""Built-in datasets generated from the source code of the Python standard library."""

import json

import pytest

from paceline.core.errors import ConfigError
from paceline.data.sources.builtin import builtin_dataset, python_source, stdlib_modules


def test_python_docs_rows_are_question_answer_pairs() -> None:
    rows = [
        json.loads(line)
        for line in builtin_dataset("python-docs").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) > 2000
    pairs = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]
    answer = next(answer for question, answer in pairs if "json.dumps" in question)
    assert answer.startswith(
        "A function of the module `json`: `json.dumps(obj)`. Serialize ``obj``"
    )
    assert all(40 <= len(answer) <= 900 for _, answer in pairs)
    assert len({question for question, _ in pairs}) > 0.95 * len(pairs)


def test_python_source_contains_complete_modules() -> None:
    modules = dict(stdlib_modules(packages=False))
    documents = [row["text"] for row in python_source()]
    text = "\n".join(documents)
    assert modules["bisect"].read_text().strip() in text
    assert len(documents) > 300
    assert not any("tests" in path.parts or "idlelib" in path.parts for path in modules.values())


def test_unknown_builtin_dataset_suggests_similar_name() -> None:
    with pytest.raises(ConfigError, match="did you mean `builtin:python-docs`"):
        builtin_dataset("pythondocs")

"""The built-in questions of the demo."""

import json
import re
from collections import Counter

from paceline.data.sources.builtin import builtin_dataset


def read(name: str) -> dict[str, str]:
    """Return the answer to each question of a built-in dataset."""
    answers = {}
    for line in builtin_dataset(name).read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        answers[question["content"]] = answer["content"]
    return answers


def kind_of(question: str) -> str:
    for kind, word in (("sum", "+"), ("time", "24-hour"), ("units", "How many")):
        if word in question:
            return kind
    raise AssertionError(question)


def expected_answer(question: str) -> str:
    """Compute the answer from the text of the question."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if kind_of(question) == "sum":
        return str(numbers[0] + numbers[1])
    if kind_of(question) == "time":
        hour, minute, _ = numbers
        return f"{hour % 12 + 12 * (' pm ' in question):02}:{minute:02}"
    small, large = re.findall(r"[a-z]+", question)[2], question.rstrip("?").split()[-1]
    meters_and_grams = {
        "millimeters": 0.001, "centimeters": 0.01, "meters": 1, "grams": 1, "milliliters": 0.001,
        "cm": 0.01, "m": 1, "km": 1000, "kg": 1000, "l": 1,
    }  # fmt: skip
    return str(round(numbers[0] * meters_and_grams[large] / meters_and_grams[small]))


def test_held_out_questions_are_not_in_the_training_data() -> None:
    trained, held_out = read("small-questions"), read("small-questions-held-out")
    assert Counter(map(kind_of, held_out)) == {"sum": 200, "time": 200, "units": 200}
    assert not trained.keys() & held_out.keys()
    sums = {frozenset(re.findall(r"\d+", text)) for text in trained if kind_of(text) == "sum"}
    held_out_sums = {frozenset(re.findall(r"\d+", text)) for text in held_out if "+" in text}
    assert not sums & held_out_sums  # 37 + 48 would give 48 + 37 away


def test_answers_are_right() -> None:
    answers = read("small-questions") | read("small-questions-held-out")
    assert {text: expected_answer(text) for text in answers} == answers

"""Test the built-in rewards, except `math`, on texts and chats."""

import pytest

from paceline.config.schema.rewards import RewardEntry
from paceline.rewards.answers import chosen_letter, final_answer, is_same_answer, letter_of
from paceline.rewards.builtin import build_reward
from paceline.rewards.group import text_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 ", "42"),
        ("6 times 7 is 42\n#### 42", "42"),
        ("#### 1\nno:\n#### 42\nDone.", "42"),
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a \} b}", r"a \} b"),
        ("<answer>\n42\n</answer>", "42"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"<answer>1</answer> rather \boxed{42}", "42"),
        (r"\boxed{1} rather <answer>42</answer>", "42"),
        (r"####   \boxed{42} apples", "42"),
        # What was cut off is no answer.
        (r"\boxed{42} and \boxed{\frac{1}{", "42"),
        ("<answer>4", "<answer>4"),
        ("<answer>1<answer>42</answer>", "42"),
        (r"{ \boxed{42} }} \boxed{", "42"),
        (r"\boxed{a \boxed{42}}", "42"),
        ("", ""),
    ],
)
def test_finds_the_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "is_same"),
    [
        ("1,234.50", "1234.5", True),
        ("3.0", "3", True),
        ("3.", "3", True),
        ("+7", "7", True),
        ("-.5", "-0.5", True),
        ("$1,000", "1000", True),
        ("$-5$", "-5", True),
        ("1e-3", "0.001", True),
        ("0.1", "0.10000000000000000001", False),
        ("12,34", "1234", False),
        ("--3", "3", False),
        ("1e999999999", "1", False),
        ("3", "three", False),
        ("New  York\n", "New York", True),
        ("new york", "New York", False),
        ("__import__('os').getpid()", "1", False),
        ("9" * 5000, "9" * 5000, True),
        ("", "", True),
    ],
)
def test_compares_numbers_as_numbers(answer: str, gold: str, is_same: bool) -> None:
    assert is_same_answer(answer, gold) is is_same


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"I think \boxed{b}", "B"),
        (r"\boxed{\text{(C) Paris}}", "C"),
        ("<answer> D. Rome </answer>", "D"),
        ("The answer is B, because A is wrong.", "B"),
        ("The answer is (A).\nNo, the correct answer is **C**.", "C"),
        ("Answer: d", "D"),
        ("The correct option is A", "A"),
        ("B", "B"),
        (" (B). ", "B"),
        ("B. Paris", "B"),
        ("A) no\nTherefore C.", "C"),
        ("We compare them.\nC", "C"),
        (r"The answer is A. \boxed{B}", "B"),
        # An article, a pronoun and a word are no choice.
        ("A cat sat. I agree that Bears eat", None),
        (r"\boxed{Paris}", None),
        ("I'm not sure", None),
        ("The answer is a number", None),
        ("The answer is a.", "A"),
        ("", None),
    ],
)
def test_finds_the_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    ("gold", "letter"),
    [("B", "B"), ("(b)", "B"), ("B. Paris", "B"), ("x #### C", "C"), ("Paris", None), ("1", None)],
)
def test_finds_the_letter_of_the_right_answer(gold: str, letter: str | None) -> None:
    assert letter_of(gold) == letter


@pytest.mark.parametrize(
    "part",
    [
        r"\boxed{", "<answer>", "</answer>", "####", "#### ", "{", "}", "\\", r"\boxed ", "answer ",
        "answer is ", "!", "A ", "A.", "(A", "\n", " ", "9", "9,", "$", "<answer>!", r"\boxed{!",
    ],
)  # fmt: skip
def test_repeated_text_takes_linear_time(part: str) -> None:
    # With quadratic time, this test would run for minutes.
    text = part * (300_000 // len(part))
    for end in ("", "7", r"}\boxed{!!7}", "</answer>"):
        assert not is_same_answer(final_answer(text + end), "the right answer")
        assert chosen_letter(text + end) in (None, "A")


def chat(text: str) -> list[object]:
    return [{"role": "assistant", "content": text}]


def test_text_of_a_chat_is_the_last_answer() -> None:
    assert text_of("text") == "text"
    assert text_of(chat("text")) == "text"
    assert text_of([*chat("first"), {"role": "tool", "content": "x"}, *chat("last")]) == "last"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert text_of([{"role": "assistant", "content": parts}]) == "ab"
    assert text_of([{"role": "assistant", "content": None}]) == ""
    assert text_of([]) == ""


def score(entry: RewardEntry, completions: list[object], **columns: object) -> list[float | None]:
    reward = build_reward(entry, 100, 60.0)
    ids = [[1]] * len(completions)
    arguments = {"prompts": ["p"] * len(completions), "completion_ids": ids, "step": 1}
    return reward(completions=completions, **{**arguments, **columns})


def test_answers_are_compared_with_their_column() -> None:
    texts = ["<answer>4.0</answer>", chat("5"), "four"]
    explanation = "2 + 2 = <<2+2=4>>4\n#### 4"
    exact = RewardEntry(name="exact")
    assert score(exact, texts, answer=[explanation, 5, None]) == [1.0, 1.0, None]
    other = RewardEntry(name="exact", column="solution")
    assert score(other, texts, answer=[4, 4, 4], solution=["4", "4", "four"]) == [1.0, 0.0, 1.0]
    choice = RewardEntry(name="choice")
    assert score(choice, ["B", "C", "B"], answer=["B", "B", "Paris"]) == [1.0, 0.0, None]
    assert score(choice, ["B"]) == [None]


def test_format_must_match_as_a_whole() -> None:
    texts = [
        "<think>\nx\n</think>\nanswer",
        chat("<think></think>"),
        "<think> x",
        "so <think>x</think> y",
        "<think>x<think>y</think>",
        "<think>x</think><think>y</think>",
    ]
    assert score(RewardEntry(name="format"), texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    own = RewardEntry(name="format", pattern=r"(yes|no)\.?")
    assert score(own, ["yes.", "no", "no!", "yes\n"]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("max_length", "cache"), [(None, 20), (50, 10), (50, 0), (50, 50)])
def test_soft_overlong_equals_trl(max_length: int | None, cache: int) -> None:
    lengths = [0, 1, 39, 40, 41, 45, 50, 51, 80, 81, 100, 101]
    reward = build_reward(
        RewardEntry(name="soft_overlong", max_length=max_length, cache=cache), 100, 60.0
    )
    ids = [[7] * length for length in lengths]
    longest = max_length or 100
    expected = [
        0.0
        if length <= longest - cache
        else (longest - cache - length) / cache
        if length <= longest
        else -1.0
        for length in lengths
    ]
    assert reward(completions=["x"] * len(ids), completion_ids=ids) == expected


def test_answer_after_a_mark_counts() -> None:
    reward = build_reward(RewardEntry(name="exact", after="</think>"), 100, 60.0)
    texts = ["4", "<think>5</think>4", "<think>4</think>5", "<think>4", "a</think>b</think> 4 "]
    assert reward(completions=texts, answer=["4"] * 5) == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert reward(completions=["", "x</think>"], answer=["", ""]) == [0.0, 1.0]
    assert reward(completions=["4"], answer=[None]) == [None]


def test_count_and_tags() -> None:
    count = build_reward(RewardEntry(name="count", pattern=r"^\d+\.", count=3), 100, 60.0)
    texts = ["", "1. a\n2. b", "1. a\n2. b\n3. c\n4. d", "see 1. and 2."]
    assert count(completions=texts) == [0.0, 2 / 3, 1.0, 0.0]
    tags = build_reward(RewardEntry(name="tags", tags=["<a>", "</a>"]), 100, 60.0)
    assert tags(completions=["", "<a>", "<a>b</a>", "<a></a></a>"]) == [0.0, 0.5, 1.0, 0.5]


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    reward = build_reward(RewardEntry(name="repetition", ngram_size=2, max_penalty=-2.0), 9, 60.0)
    assert reward(completions=["", "a", "a b c", "A b a B a", "a a a a a"]) == [
        0.0,
        0.0,
        0.0,
        -2.0 * (1 - 2 / 4),
        -2.0 * (1 - 1 / 4),
    ]
    one = build_reward(RewardEntry(name="repetition", ngram_size=1, max_penalty=0.0), 9, 60.0)
    assert one(completions=["a a"]) == [0.0]

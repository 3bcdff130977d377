"""Test the built-in reward `math` with the package math-verify."""

import importlib.util

import pytest

from paceline.config.schema.grpo import Grpo
from paceline.config.schema.rewards import RewardEntry
from paceline.rewards.builtin import build_reward
from paceline.rewards.group import CompletionGroup
from paceline.rewards.isolation import score_isolated
from paceline.rewards.scorer import RewardScorer

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
TEXTS = [
    r"The answer is \boxed{\frac{1}{2}}.",
    r"\boxed{0.5}",
    r"The final answer is $\frac{2}{4}$. I hope it is correct.",
    r"\boxed{2}",
    "one half",
    r"\boxed{\frac{1}{",
    r"\boxed{__import__('os')._exit(3)}",
    "",
]


@needs_package
@pytest.mark.parametrize(
    "gold", [r"\frac{1}{2}", "0.5", r"It is \boxed{1/2}", "half of it\n#### 0.5"]
)
def test_math_compares_expressions(gold: str) -> None:
    reward = build_reward(RewardEntry(name="math"), 100, 60.0)
    scores = reward(completions=TEXTS, answer=[gold] * len(TEXTS))
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@needs_package
def test_math_skips_rows_without_an_expression() -> None:
    reward = build_reward(RewardEntry(name="math", column="solution"), 100, 60.0)
    assert reward(completions=["1", "2"], solution=["a b c", "a b c"]) == [None, None]
    assert reward(completions=["1", "2"], solution=[None, None]) == [None, None]
    assert reward(completions=[r"\boxed{3}"], solution=[3]) == [1.0]


@needs_package
@pytest.mark.soak
def test_math_equals_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    for gold in (r"\frac{1}{2}", "$0.5$", "x + 1", "nothing"):
        chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
        reward = build_reward(RewardEntry(name="math"), 100, 60.0)
        assert reward(completions=chats, answer=[gold] * len(TEXTS)) == rewards.accuracy_reward(
            chats, [gold] * len(TEXTS)
        )


@needs_package
@pytest.mark.soak
def test_completion_that_cannot_be_computed_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    scorer = RewardScorer([RewardEntry(name="math")], Grpo(reward_timeout_s=5), 1)
    texts = [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{4}"]
    group = CompletionGroup(0, "row 1", "p", texts, [[1], [1]], {"answer": "4"})
    assert scorer.score([group], 1).tolist() == [[[0.0], [1.0]]]
    scorer.close()
    assert "9^{9^{9^{9^9}}}" in capfd.readouterr().err


def test_scores_until_an_item_fails() -> None:
    def score(number: int) -> float:
        if number == 2:
            raise ValueError
        while number == 4:
            pass
        return 1 / number

    assert score_isolated(score, [1, 2, 8, 4, 5], 0.2) == [1.0, None, 0.125, None, 0.2]
    assert score_isolated(score, [], 0.2) == []


@needs_package
def test_cosine_depends_on_length_and_answer() -> None:
    entry = RewardEntry(name="cosine", max_length=4, correct=[1.0, 0.5], wrong=[-0.5, 0.0])
    reward = build_reward(entry, 100, 60.0)
    right, wrong = r"\boxed{3}", r"\boxed{4}"
    ids = [[1] * length for length in (0, 2, 4, 9, 0, 4)]
    scores = reward(completions=[right] * 4 + [wrong] * 2, completion_ids=ids, answer=["3"] * 6)
    assert scores == pytest.approx([1.0, 0.75, 0.5, 0.5, -0.5, 0.0])
    skipped = reward(completions=[right], completion_ids=[[1]], answer=["a b c"])
    assert skipped == [None]
    # The first values belong to an empty text, and the last ones to half of 18 characters.
    of_text = build_reward(RewardEntry(name="cosine", max_length=18, unit="characters"), 9, 60.0)
    assert of_text(completions=[right], completion_ids=[[1]], answer=["3"]) == [pytest.approx(0.75)]


@needs_package
def test_length_compares_the_completions_of_a_prompt() -> None:
    reward = build_reward(RewardEntry(name="length", column="solution"), 100, 60.0)
    texts = [r"\boxed{3}", r"So \boxed{3}", r"\boxed{4}", r"It is \boxed{4}"]
    scores = reward(completions=texts, solution=["3"] * 4)
    assert scores == pytest.approx([0.5, 0.0, 0.0, -0.5])
    assert reward(completions=texts[:1] * 2, solution=["3"] * 2) == [0.0, 0.0]
    assert reward(completions=texts[:2], solution=["a b", "a b"]) == [None, None]


@needs_package
@pytest.mark.soak
def test_answer_after_reasoning_equals_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    texts = [f"<think> {first} </think> {last}" for first in TEXTS[:4] for last in TEXTS[:4]]
    chats = [[{"role": "assistant", "content": text}] for text in [*texts, *TEXTS]]
    reward = build_reward(RewardEntry(name="math", after="</think>"), 100, 60.0)
    gold = [r"\frac{1}{2}"] * len(chats)
    assert reward(completions=chats, answer=gold) == rewards.reasoning_accuracy_reward(chats, gold)

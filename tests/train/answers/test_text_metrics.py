"""Metrics of text agree with the published definitions."""

import math
from pathlib import Path

import pytest
from raised import raises_error

from paceline.config.metrics.evaluation import check_lm_eval, check_metrics
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.train.answers.text_metrics import load_user_metrics, split_text, text_metric

ANSWERS = ["The cat sat on the mat.", "forty-two", "", "An apple", "Paris, France"]
REFERENCES = ["the cat is on a mat", "forty-two", "nothing", "", "Paris"]


@pytest.mark.soak  # the import of torchmetrics takes seconds
def test_f1_and_exact_match_as_in_squad() -> None:
    from torchmetrics.functional.text import squad

    rows = [{"prediction_text": text, "id": str(n)} for n, text in enumerate(ANSWERS)]
    targets = [
        {"answers": {"text": [text], "answer_start": [0]}, "id": str(n)}
        for n, text in enumerate(REFERENCES)
    ]
    expected = float(squad(rows, targets)["f1"]) / 100
    assert text_metric("f1")(ANSWERS, REFERENCES) == {"f1": pytest.approx(expected, rel=1e-6)}
    assert text_metric("exact_match")([" a", "b"], ["a", "c"]) == {"exact_match": 0.5}


def test_rouge_of_english_as_in_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(*pair) for pair in zip(REFERENCES, ANSWERS, strict=True)]
    assert text_metric("rouge")(ANSWERS, REFERENCES) == {
        name: pytest.approx(math.fsum(score[name].fmeasure for score in scores) / len(scores))
        for name in ("rouge1", "rouge2", "rougeL")
    }


def test_chinese_text_is_split_into_characters() -> None:
    assert split_text("GPU 加速_x1") == ["gpu", "加", "速", "x1"]
    assert text_metric("rouge")(["今天天气好"], ["今天天气好"])["rougeL"] == 1.0
    assert text_metric("f1")(["今天"], ["今天天气"]) == {"f1": pytest.approx(2 / 3)}
    assert text_metric("bleu")(["今天天气很好"], ["今天天气很好"])["bleu"] == pytest.approx(100.0)


@pytest.mark.parametrize("name", ["bleu", "chrf", "ter"])
def test_corpus_metrics_of_equal_texts(name: str) -> None:
    texts = ["the cat is on the mat", "a second sentence of words"]
    best = 0.0 if name == "ter" else 100.0
    assert text_metric(name)(texts, texts) == {name: pytest.approx(best)}
    assert text_metric(name)(["none of these"] * 2, texts)[name] != pytest.approx(best)


def test_function_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "own_metrics.py"
    file.write_text(
        "def length(answers, references):\n"
        "    return sum(map(len, answers)) / len(answers)\n"
        "def both(answers, references):\n"
        "    return {'first': 1, 'second': len(references)}\n"
        "number = 3\n"
    )
    assert text_metric(f"{file}:length")(["ab", "abcd"], ["", ""]) == {"length": 3.0}
    assert text_metric(f"{file}:both")(["ab"], ["x"]) == {"first": 1.0, "second": 1.0}
    for name, expected in (
        (f"{file}:number", "has no function number"),
        (f"{tmp_path}/missing.py:f", "file not found"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_user_metrics(Config(model="m", dataset="d", evaluation={"metrics": [name]}))


@pytest.mark.parametrize(
    ("metrics", "task", "error"),
    [
        (["rogue"], "sft", ("unknown-metric", "")),
        (["perplexity", "bleu"], "pretrain", ("answer-metrics-with-pretrain", "task")),
        (["perplexity"], "recommend", ("text-metrics-with-task", "task")),
    ],
)
def test_metrics_that_do_not_fit(metrics: list[str], task: str, error: tuple[str, str]) -> None:
    config = Config(model="m", dataset="d", task=task, evaluation={"metrics": metrics})
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_metrics(config)


@pytest.mark.parametrize("task", ["sft", "pretrain", "dpo", "orpo", "kto", "simpo"])
def test_harness_evaluates_language_models(task: str) -> None:
    settings = {"lm_eval": {"tasks": ["arc_easy"]}}
    check_lm_eval(Config(model="m", dataset="d", task=task, evaluation=settings))
    for other in ("reward", "classify"):
        config = Config(model="m", dataset="d", task=other, evaluation=settings)
        with raises_error(ConfigError, code="lm-eval-with-task", naming=other):
            check_lm_eval(config)

"""Metrics that compare generated answers with their references. Imports no torch."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from paceline.config.metrics.evaluation import is_user_metric
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.user_code import import_user_module

#: Takes the answers and their references; returns values by name.
TextMetric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]

_FORM = "./file.py:function or package.module:function"
#: Chinese, Japanese and Korean characters, which are not separated by spaces.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def split_text(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters and digits, and each CJK character
    alone. For English, the same as in rouge-score."""
    return _TOKEN.findall(text.lower())


def exact_match(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the share of answers that equal their reference, apart from spaces around them."""
    pairs = zip(answers, references, strict=True)
    return {"exact_match": _mean([answer.strip() == text.strip() for answer, text in pairs])}


def f1(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F1 of the words that an answer and its reference share, as SQuAD computes
    it."""
    pairs = zip(answers, references, strict=True)
    return {"f1": _mean([_f1(_squad_words(answer), _squad_words(text)) for answer, text in pairs])}


def _squad_words(text: str) -> list[str]:
    """Return the words without case, punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    spaced = re.sub(rf"([{_CJK}])", r" \1 ", re.sub(r"\b(a|an|the)\b", " ", text))
    return spaced.split()


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    num_shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * num_shared / (len(answer) + len(reference))


def rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, between 0 and 1."""
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(names, tokenizer=_TextSplitter())
    pairs = zip(answers, references, strict=True)
    scores = [scorer.score(text, answer) for answer, text in pairs]
    return {name: _mean([score[name].fmeasure for score in scores]) for name in names}


class _TextSplitter:
    """A tokenizer of rouge-score. Its default one drops letters outside of a to z."""

    def tokenize(self, text: str) -> list[str]:
        return split_text(text)


def _of_corpus(name: str) -> TextMetric:
    """Return a metric of sacrebleu over all answers, with its default settings."""

    def compute(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        import sacrebleu

        options = {}
        if name == "bleu" and any(re.search(f"[{_CJK}]", text) for text in references):
            options["tokenize"] = "zh"  # separates CJK characters; other text is split as usual
        score = getattr(sacrebleu, f"corpus_{name}")(answers, [references], **options)
        return {name: float(score.score)}

    return compute


_BUILT_IN: dict[str, TextMetric] = {
    "exact_match": exact_match,
    "f1": f1,
    "rouge": rouge,
    **{name: _of_corpus(name) for name in ("bleu", "chrf", "ter")},
}


@cache
def text_metric(name: str) -> TextMetric:
    """Return the metric of a name in ``evaluation.metrics``.

    Raises:
        ConfigError: the file or the function of a user does not exist, or the file raised.
    """
    return _user_metric(name) if is_user_metric(name) else _BUILT_IN[name]


def load_user_metrics(config: Config) -> None:
    """Load the functions of a user, so that their errors are reported before the run starts.

    Raises:
        ConfigError: as :func:`text_metric`.
    """
    for name in filter(is_user_metric, config.evaluation.metrics):
        text_metric(name)


def _user_metric(name: str) -> TextMetric:
    location, _, function_name = name.rpartition(":")
    setting = f"evaluation.metrics: {name}"
    function = getattr(import_user_module(location, setting, _FORM), function_name, None)
    if not callable(function):
        raise ConfigError(
            "`{setting}`: {location} has no function {function_name}",
            code="metric-function-missing",
            allowed=_FORM,
            fix="define `def {function_name}(answers, references):` in it",
            setting=setting,
            location=location,
            function_name=function_name,
        )

    def compute(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        result: Any = function(list(answers), list(references))
        if not isinstance(result, Mapping):
            result = {function_name: result}
        return {str(key): float(value) for key, value in result.items()}

    return compute


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

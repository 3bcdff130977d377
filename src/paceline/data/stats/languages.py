"""Identify the languages of samples, through py3langid."""

from collections import Counter
from typing import TypedDict

from paceline.core.stop import poll
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import LoadedTokenizer

#: Number of tokens of a sample that are read.
_MAX_TOKENS = 512


class LanguageShare(TypedDict):
    """The number of samples in a language (ISO 639-1), their share of all, and their tokens."""

    language: str
    samples: int
    share: float
    tokens: int


def languages(dataset: TokenDataset, tokenizer: LoadedTokenizer) -> list[LanguageShare]:
    """Return the languages of the texts that carry loss (the answers of chats), or of labeled
    texts, the most frequent first. A text without letters is ``und``, undetermined."""
    import py3langid

    samples: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for index in range(len(dataset)):
        if index % 1000 == 0:
            poll()
        sample = dataset[index]
        ids = sample["input_ids"]
        if not dataset.has("label"):
            ids = ids[sample["labels_mask"]]
        ids = ids[:_MAX_TOKENS].tolist()
        text = tokenizer.decode([each for each in ids if each not in tokenizer.special_ids])
        language = "und"
        if any(letter.isalpha() for letter in text):
            language = str(py3langid.classify(text)[0])
        samples[language] += 1
        tokens[language] += len(sample["input_ids"])
    return [
        LanguageShare(
            language=language, samples=count, share=count / len(dataset), tokens=tokens[language]
        )
        for language, count in samples.most_common()
    ]

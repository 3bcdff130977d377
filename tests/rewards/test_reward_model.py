"""Test reward models: rewards of texts and chats do not depend on the other completions."""

from pathlib import Path

import pytest
import torch
from raised import raises_error
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from paceline.config.schema.rewards import RewardEntry
from paceline.core.errors import ConfigError, RunError
from paceline.rewards.functions import check_reward_model
from paceline.rewards.group import CompletionGroup
from paceline.rewards.reward_model import RewardModel

WORDS = ["<pad>", "<s>", "</s>", "user", "assistant", "red", "green", "blue", "a", "tree"]
TEMPLATE = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    return tmp_path


def group(prompt: object, completions: list[object]) -> CompletionGroup:
    return CompletionGroup(0, "data.jsonl, row 1", prompt, completions, [[1]] * len(completions))


def expected(folder: Path, words: str) -> float:
    """Return the reward of one text without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([[WORDS.index(word) for word in words.split()]])
    with torch.no_grad():
        return model(input_ids=ids).logits.item()


def test_scores_texts_and_chats(folder: Path) -> None:
    check_reward_model(RewardEntry(model=str(folder)))
    model = RewardModel(str(folder), "cpu")
    texts = group("red ", ["green tree a blue", "blue"])
    assert model.score(texts) == pytest.approx(
        [expected(folder, "red green tree a blue </s>"), expected(folder, "red blue </s>")],
        abs=1e-6,
    )
    chats = [[{"role": "assistant", "content": text}] for text in ("green tree a blue", "blue")]
    chat = group([{"role": "user", "content": "red"}], chats)
    start = "<s> user red </s> <s> assistant"
    assert model.score(chat) == pytest.approx(
        [
            expected(folder, f"{start} green tree a blue </s>"),
            expected(folder, f"{start} blue </s>"),
        ],
        abs=1e-6,
    )
    assert len({*model.score(texts), *model.score(chat)}) == 4


def test_rejects_texts_that_are_too_long(folder: Path) -> None:
    model = RewardModel(str(folder), "cpu")
    with raises_error(RunError, code="reward-model-too-short", naming="accepts 32"):
        model.score(group("red ", ["green " * 32]))


def test_chats_need_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    model = RewardModel(str(folder), "cpu")
    chat = [{"role": "assistant", "content": "red"}]
    with raises_error(RunError, code="reward-model-template", naming="row 1"):
        model.score(group([{"role": "user", "content": "red"}], [chat]))


def test_rejects_folder_with_damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with raises_error(ConfigError, code="reward-model-not-loaded"):
        RewardModel(str(folder), "cpu")

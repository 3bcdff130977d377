"""Completions with a cache of keys and values equal the completions of full forward passes."""

import pytest
import torch
from families import build_model
from transformers import PreTrainedModel

from paceline.rollouts.decoding import Completion, GroupDecoder, can_pad
from paceline.rollouts.sampling import Sampling, draw_uniforms

PROMPT = [5, 9, 3, 7]
LENGTH = 10


def decode(model: PreTrainedModel, end_ids: set[int]) -> list[Completion]:
    ticks: list[None] = []
    decoder = GroupDecoder(model, Sampling(), frozenset(end_ids), True, lambda: ticks.append(None))
    with torch.no_grad():
        return decoder.decode(PROMPT, draw_uniforms(0, "rollout", 0, 0, 6, LENGTH))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mamba", "jamba"])
def test_tokens_and_probabilities_are_those_of_full_passes(family: str) -> None:
    model = build_model(family).eval()
    # Some tokens end a completion, so that rows are dropped at different positions.
    vocabulary = model.config.get_text_config().vocab_size
    ends = set(range(0, vocabulary, 6))
    completions = decode(model, ends)
    uniforms = draw_uniforms(0, "rollout", 0, 0, 6, LENGTH)
    lengths = {len(completion.ids) for completion in completions}
    assert len(lengths) > 1
    for number, completion in enumerate(completions):
        assert completion.is_truncated == (completion.ids[-1] not in ends)
        assert not ends & set(completion.ids[:-1])
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 :]
        for position, (token, logp) in enumerate(
            zip(completion.ids, completion.logps, strict=True)
        ):
            row = logits[position : position + 1]
            drawn, expected = Sampling().draw(row, uniforms[number, position : position + 1])
            assert token == drawn.item()
            assert logp == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_prefixes_of_different_lengths_are_padded(family: str) -> None:
    model = build_model(family).eval()
    assert can_pad(model)
    prefixes = [[5, 9, 3, 7], [4], [8, 2, 6, 1, 3, 9, 5]]
    limits = [LENGTH, 6, LENGTH - 1]
    uniforms = [
        row[:limit]
        for row, limit in zip(draw_uniforms(0, "rollout", 0, 0, 3, LENGTH), limits, strict=True)
    ]
    vocabulary = model.config.get_text_config().vocab_size
    ends = frozenset(range(0, vocabulary, 9))
    decoder = GroupDecoder(model, Sampling(), ends, True, lambda: None)
    with torch.no_grad():
        batch = decoder.decode_each(prefixes, uniforms)
        for completion, prefix, limit, row in zip(batch, prefixes, limits, uniforms, strict=True):
            (alone,) = decoder.decode(prefix, row.unsqueeze(0))
            assert completion.ids == alone.ids
            assert completion.logps == pytest.approx(alone.logps, abs=1e-4)
            assert completion.is_truncated == alone.is_truncated
            assert len(completion.ids) <= limit
    assert len({len(completion.ids) for completion in batch}) > 1


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_next"])
def test_recurrent_layers_are_not_padded(family: str) -> None:
    assert not can_pad(build_model(family))


def test_a_rank_without_a_prompt_keeps_up() -> None:
    model = build_model("llama").eval()
    rounds = iter([False, False, True])
    decoder = GroupDecoder(
        model, Sampling(), frozenset(), True, lambda: None, lambda is_done: next(rounds)
    )
    with torch.no_grad():
        decoder.keep_up(PROMPT)
    assert next(rounds, None) is None

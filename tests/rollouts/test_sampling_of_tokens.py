"""Drawing tokens: the distribution, and random numbers that depend on nothing else."""

import pytest
import torch

from paceline.rollouts.sampling import Sampling, draw_uniforms


def test_tokens_have_the_probabilities_of_the_model() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    uniforms = draw_uniforms(1, "rollout", 0, 0, 1, 20_000)[0]
    tokens, logps = Sampling(temperature=0.7).draw(logits.expand(20_000, -1), uniforms)
    expected = (logits / 0.7).softmax(-1)
    shares = torch.bincount(tokens, minlength=5) / 20_000
    assert torch.allclose(shares, expected, atol=0.015)
    assert torch.allclose(logps, expected.log()[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {2, 4}),
        (Sampling(top_p=0.6), {2, 4}),  # 0.54, then 0.20
        (Sampling(top_p=0.5), {2}),
        (Sampling(top_k=3, top_p=0.99), {0, 2, 4}),
    ],
)
def test_restrictions(sampling: Sampling, allowed: set[int]) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0]).expand(4000, -1)
    uniforms = draw_uniforms(1, "rollout", 0, 0, 1, 4000)[0]
    tokens, logps = sampling.draw(logits, uniforms)
    assert set(tokens.tolist()) == allowed
    # The loss computes log-probabilities from all tokens.
    assert torch.allclose(logps, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_a_uniform_close_to_one_draws_a_token_with_a_chance() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, :3] = 0.0
    uniforms = torch.tensor([1.0 - 2**-53], dtype=torch.float64)
    assert Sampling().draw(logits, uniforms)[0].item() == 2


def test_random_numbers_depend_on_step_prompt_index_and_position_only() -> None:
    numbers = draw_uniforms(7, "rollout", 3, 11, 4, 6)
    assert numbers.shape == (4, 6)
    assert torch.equal(draw_uniforms(7, "rollout", 3, 11, 2, 4), numbers[:2, :4])
    for other in (
        draw_uniforms(8, "rollout", 3, 11, 4, 6),
        draw_uniforms(7, "evaluation", 3, 11, 4, 6),
        draw_uniforms(7, "rollout", 4, 11, 4, 6),
        draw_uniforms(7, "rollout", 3, 12, 4, 6),
    ):
        assert not torch.isclose(other, numbers).any()

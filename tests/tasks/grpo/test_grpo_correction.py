"""The correction for the probabilities of an engine: it agrees with TRL's, on any number of ranks,
and RLOO multiplies the loss of a completion by the same ratio."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_runs import BATCH, paceline_steps, record_rollouts, trl_steps
from trl_runs import STEPS, make_model

from paceline.config.schema.grpo import Grpo
from paceline.tasks.grpo.correction import ProbabilityCorrection
from paceline.tasks.grpo.objective import GroupObjective, LeaveOneOutObjective
from paceline.tasks.grpo.tokens import CompletionTokens

LOGPS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -3.0]])
SAMPLED = torch.tensor([[-1.2, -1.0, -0.5], [-3.5, -0.2, -9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
ADVANTAGES = torch.tensor([1.0, -2.0])


def tokens(sampled: torch.Tensor = SAMPLED) -> CompletionTokens:
    return CompletionTokens(
        logps=LOGPS.clone(),
        entropies=torch.zeros_like(LOGPS),
        mask=MASK,
        advantages=ADVANTAGES,
        old_logps=LOGPS,
        sampled_logps=sampled,
        reference_logps=None,
        sum_by_row=lambda values: values.sum(1),
        by_token=lambda values: values.unsqueeze(1),
    )


def mean(metric: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(metric[0] / metric[1])


#: Ratios of the tokens; the last token of the second completion does not count.
RATIOS = [[math.exp(0.2), math.exp(-1.0), 1.0], [math.exp(2.0), 1.0, 1.0]]


@pytest.mark.parametrize(
    ("mode", "limits", "expected", "clipped"),
    [
        ("token_truncate", (None, 3.0), [RATIOS[0], [3.0, 1.0, 1.0]], 1 / 5),
        ("token_mask", (0.5, 3.0), [[RATIOS[0][0], 0.0, 1.0], [0.0, 1.0, 1.0]], 2 / 5),
        ("sequence_truncate", (0.5, 3.0), [0.5, 3.0], 1.0),
        ("sequence_mask", (None, 3.0), [math.exp(-0.8), 0.0], 1 / 2),
        ("sequence_mask", (None, None), [math.exp(-0.8), math.exp(2.0)], 0.0),
    ],
)
def test_ratios_are_limited_or_left_out(
    mode: Any, limits: tuple[Any, Any], expected: list[Any], clipped: float
) -> None:
    ratios, metrics = ProbabilityCorrection(mode, *limits).ratios(tokens())
    torch.testing.assert_close(ratios, torch.tensor(expected))
    assert mean(metrics["importance_clipped"]) == pytest.approx(clipped)
    kept = ratios if ratios.dim() == 1 else ratios[MASK.bool()]
    assert mean(metrics["importance_ratio"]) == pytest.approx(float(kept.mean()))


def test_a_token_without_a_probability_is_not_corrected() -> None:
    sampled = SAMPLED.clone()
    sampled[0, 1] = math.nan
    ratios, _ = ProbabilityCorrection("token_truncate", None, 3.0).ratios(tokens(sampled))
    assert ratios[0].tolist() == pytest.approx([RATIOS[0][0], 1.0, 1.0])
    _, metrics = GroupObjective(Grpo(), 0.0).loss(tokens(sampled))
    assert mean(metrics["logprob_diff"]) == pytest.approx((0.2 + 0.0 + 2.0 + 0.0) / 4)


def test_rloo_multiplies_the_loss_of_each_completion() -> None:
    correction = ProbabilityCorrection("sequence_truncate", None, 3.0)
    loss, metrics = LeaveOneOutObjective(Grpo(), correction).loss(tokens())
    assert float(loss) == pytest.approx(-1.0 * math.exp(-0.8) + 2.0 * 3.0)
    assert mean(metrics["importance_ratio"]) == pytest.approx((math.exp(-0.8) + 3.0) / 2)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mode": "token_truncate", "clip_max": 2.0}, {}),
    ({"mode": "token_mask", "clip_max": 2.0, "clip_min": 0.4}, {"num_iterations": 2}),
    ({"mode": "sequence_truncate", "clip_max": 3.0}, {"loss_type": "grpo", "beta": 0.04}),
    ({"mode": "sequence_mask", "clip_max": 1.5}, {"mask_truncated_completions": True}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("correction", "settings"), CASES, ids=lambda value: str(value)[:50])
def test_first_steps_agree_with_trl(
    correction: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    replay = tmp_path / "replay"
    iterations = settings.get("num_iterations", 1)
    records = record_rollouts(replay, config["eos_token_id"], iterations, False, noise=1.0)
    expected, _ = trl_steps(
        "grpo", model, records, tmp_path / "trl", correction=correction, **settings
    )
    keys = [f"grpo.{name}={json.dumps(value)}" for name, value in settings.items()]
    keys += [f"grpo.importance_sampling_{name}={value}" for name, value in correction.items()]
    keys += ["grpo.importance_sampling_correction=true", "parallel.num_gpus=2"]
    keys += ["per_device_train_batch_size=1", f"train_args.global_batch_size={BATCH}"]
    actual, _ = paceline_steps("grpo", model, replay, tmp_path / "run", *keys)
    assert len(actual) == len(expected) == STEPS
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name in ("loss", "grad_norm"):
            # Ratios of up to 3 amplify the rounding of the steps before.
            close = pytest.approx(theirs[name], rel=1e-4, abs=1e-5)
            assert ours[name] == close, f"step {number + 1}: {name}"
        mean_name = "sampling/importance_sampling_ratio/mean"
        if mean_name in theirs:  # only in the first step of a rollout
            assert ours["importance_ratio"] == pytest.approx(theirs[mean_name], rel=1e-4)
            difference = theirs["sampling/sampling_logp_difference/mean"]
            assert ours["logprob_diff"] == pytest.approx(difference, rel=1e-4)
    assert any(step["importance_clipped"] > 0 for step in actual)

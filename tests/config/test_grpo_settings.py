"""Test the section `grpo` and the list `rewards` of the config."""

from collections.abc import Callable

import pytest
from raised import raises_error

from paceline.config.load import Loaded, load_stored, own_keys
from paceline.config.schema.grpo import Grpo, check_completions_per_batch
from paceline.config.schema.rewards import reward_labels
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
GRPO = f"{BASE}task: grpo\n"
EXACT = f"{GRPO}rewards: [{{name: exact}}]\n"
Load = Callable[..., Loaded]


def test_reads_rewards_and_writes_them_again(load: Load) -> None:
    text = (
        "rewards:\n"
        "- {function: './rewards.py:length', weight: 0.5}\n"
        "- {function: package.module:length}\n"
        "- {name: math, column: solution}\n"
        "- {name: exact}\n"
        "- {name: format, pattern: '.+'}\n"
        "- {name: soft_overlong, max_length: 100, cache: 20, weight: -1}\n"
        "- {model: ./reward/model/}\n"
    )
    config = load(GRPO + text).config
    labels = ["length", "length_2", "math", "exact", "format", "soft_overlong", "model"]
    assert reward_labels(config.rewards) == labels
    columns = [reward.answer_column for reward in config.rewards]
    assert columns == [None, None, "solution", "answer", None, None, None]
    assert [reward.weight for reward in config.rewards] == [0.5, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0]
    assert load_stored(config.model_dump(mode="json")) == config
    assert load_stored(own_keys(config)) == config


def test_reward_may_be_written_without_a_list(load: Load) -> None:
    assert [reward.name for reward in load(GRPO + "rewards: {name: choice}").config.rewards] == [
        "choice"
    ]


@pytest.mark.parametrize(
    ("rewards", "code"),
    [
        ("[3]", "reward-not-a-mapping"),
        ("[math]", "reward-not-a-mapping"),
        ("[{}]", "reward-without-kind"),
        ("[{weight: 2}]", "reward-without-kind"),
        ("[{name: math, function: './a.py:b'}]", "reward-without-kind"),
        ("[{name: exact}, {name: maths}]", "unknown-reward"),
        ("[{name: math, pattern: x}]", "unknown-reward-option"),
        ("[{model: ./m, column: x}]", "unknown-reward-option"),
        ("[{function: './a.py:b', threshold: 3}]", "unknown-reward-option"),
        ("[{name: format, pattern: '('}]", "invalid-reward-pattern"),
        ("[{name: format, pattern: 5}]", "invalid-reward-option"),
        ("[{name: exact, column: ''}]", "invalid-reward-option"),
        ("[{name: exact, weight: high}]", "invalid-reward-option"),
        ("[{name: exact, weight: true}]", "invalid-reward-option"),
        ("[{name: exact, weight: .nan}]", "invalid-reward-option"),
        ("[{function: ./a.py}]", "invalid-reward-option"),
        ("[{function: 'length'}]", "invalid-reward-option"),
        ("[{function: './a.py:'}]", "invalid-reward-option"),
        ("[{name: soft_overlong}]", "reward-without-option"),
        ("[{name: count}]", "reward-without-option"),
        ("[{name: tags}]", "reward-without-option"),
        ("[{name: tags, tags: []}]", "invalid-reward-option"),
        ("[{name: tags, tags: [a, '']}]", "invalid-reward-option"),
        ("[{name: tags, tags: a}]", "invalid-reward-option"),
        ("[{name: count, pattern: a, count: 0}]", "invalid-reward-option"),
        ("[{name: count, pattern: '['}]", "invalid-reward-pattern"),
        ("[{name: cosine, correct: [1]}]", "invalid-reward-option"),
        ("[{name: cosine, wrong: [0, .inf]}]", "invalid-reward-option"),
        ("[{name: cosine, unit: words}]", "invalid-reward-option"),
        ("[{name: cosine, cache: 3}]", "unknown-reward-option"),
        ("[{name: repetition, max_penalty: 0.5}]", "invalid-reward-option"),
        ("[{name: repetition, ngram_size: true}]", "invalid-reward-option"),
        ("[{name: exact, after: 5}]", "invalid-reward-option"),
        ("[{name: format, after: '</think>'}]", "unknown-reward-option"),
        ("[{name: soft_overlong, cache: 1.5}]", "invalid-reward-option"),
        ("[{name: soft_overlong, cache: 10, max_length: 0}]", "invalid-reward-option"),
        ("[{name: soft_overlong, cache: 513}]", "overlong-cache"),
        ("[{name: soft_overlong, cache: 20, max_length: 10}]", "overlong-cache"),
        ("[]", "no-rewards"),
        ("null", "no-rewards"),
        ("3", "wrong-type"),
    ],
)
def test_rejects_invalid_rewards(load: Load, rewards: str, code: str) -> None:
    with raises_error(ConfigError, code=code):
        load(f"{GRPO}rewards: {rewards}\n")


def test_rewards_belong_to_a_task_with_completions(load: Load) -> None:
    with raises_error(ConfigError, code="rewards-with-task", naming="task: sft"):
        load(BASE + "rewards: [{name: exact}]\n")
    with raises_error(ConfigError, code="no-rewards", naming="task: rloo"):
        load(BASE + "task: rloo\n")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ("loss_type: bnpo", "loss-of-micro-batch"),
        ("loss_type: cispo", "unknown-value"),
        ("scale_rewards: max", "unknown-value"),
        ("num_generations: 1", "out-of-range"),
        ("max_completion_length: 0", "out-of-range"),
        ("temperature: 0", "out-of-range"),
        ("top_p: 1.1", "out-of-range"),
        ("top_k: -1", "out-of-range"),
        ("num_iterations: 0", "out-of-range"),
        ("beta: -0.1", "out-of-range"),
        ("epsilon: 1.5", "out-of-range"),
        ("reward_timeout_s: 0", "out-of-range"),
        ("reward_workers: 0", "out-of-range"),
        ("keep_rollouts: -1", "out-of-range"),
        ("engine: sglang", "unknown-value"),
        ("reward_clip_range: [1, -1]", "invalid-clip-range"),
        ("reward_clip_range: [1]", "invalid-clip-range"),
        ("replay: ./rollouts, dynamic_sampling: true", "replay-with-dynamic-sampling"),
        ("unknown: 1", "unknown-key"),
    ],
)
def test_rejects_invalid_settings(load: Load, settings: str, code: str) -> None:
    with raises_error(ConfigError, code=code):
        load(f"{EXACT}grpo: {{{settings}}}\n")


def test_spellings_of_scale_rewards(load: Load) -> None:
    for value, expected in [("true", "group"), ("false", "none"), ("none", "none")]:
        assert load(f"{EXACT}grpo: {{scale_rewards: {value}}}").config.grpo.scale_rewards == (
            expected
        )


def test_beta_depends_on_the_task() -> None:
    assert (Grpo().beta_of("grpo"), Grpo().beta_of("rloo")) == (0.0, 0.05)
    assert Grpo(beta=0.0).beta_of("rloo") == 0.0


@pytest.mark.soak
def test_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    fields = trl.GRPOConfig.__dataclass_fields__
    # `max_completion_length` differs, and `beta` depends on the task.
    shared = (Grpo.model_fields.keys() & fields.keys()) - {"max_completion_length", "beta"}
    assert len(shared) >= 10
    assert {name: getattr(Grpo(), name) for name in shared} == {
        name: fields[name].default for name in shared
    }
    betas = [kind.__dataclass_fields__["beta"].default for kind in (trl.GRPOConfig, trl.RLOOConfig)]
    assert [Grpo().beta_of("grpo"), Grpo().beta_of("rloo")] == betas


def test_reports_settings_without_effect(load: Load) -> None:
    settings = "grpo: {loss_type: grpo, normalize_advantages: true, top_k: 5}\n"
    unused = {
        task: set(load(f"{text}{settings}").config.grpo.unused(task))
        for task, text in {
            "grpo": EXACT,
            "rloo": EXACT.replace("grpo", "rloo"),
            "sft": BASE,
        }.items()
    }
    assert unused == {
        "grpo": {"normalize_advantages"},
        "rloo": {"loss_type"},
        "sft": {"loss_type", "normalize_advantages", "top_k"},
    }


@pytest.mark.parametrize(
    ("size", "nearest"), [(12, "8 or 16"), (4, "8"), (17, "16 or 24"), (0, "8")]
)
def test_batch_must_hold_whole_groups(size: int, nearest: str) -> None:
    check_completions_per_batch(16, Grpo())
    with raises_error(ConfigError, code="batch-divides-groups") as caught:
        check_completions_per_batch(size, Grpo())
    assert caught.value.allowed == nearest


def test_ranks_share_the_cores_for_rewards() -> None:
    assert [Grpo().workers_per_rank(16, ranks) for ranks in (1, 8, 32)] == [16, 2, 1]
    assert Grpo(reward_workers=3).workers_per_rank(16, 8) == 3

"""Test that configs for unsupported training methods are rejected, by name or by the keys of those
methods."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run

from paceline.config.compat.keys import method_tables
from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rl: dpo", "DPO"),
        ("rl: ipo", "IPO"),
        ("rl: kto", "KTO"),
        ("rl: orpo\norpo_alpha: 0.1", "ORPO"),
        ("rl: simpo\nrl_beta: 0.1\nsimpo_gamma: 0.5", "SimPO"),
        ("rl: grpo\ntrl: {num_generations: 4}\nvllm: {port: 8000}", "GRPO"),
        ("reward_model: true", "reward modeling"),
        ("process_reward_model: true", "process reward modeling"),
        ("rlhf_type: dpo\nbeta: 0.1", "DPO"),
        ("rlhf_type: gkd", "GKD"),
        ("rlhf_type: rm", "reward modeling"),
        ("stage: dpo", "DPO"),
        ("stage: kto", "KTO"),
        ("stage: rm", "reward modeling"),
        ("stage: ppo\nreward_model: saves/reward", "PPO"),
        ("stage: dpo\npref_beta: 0.1\npref_loss: orpo", "DPO"),
        ("pref_beta: 0.1\npref_loss: simpo", "SimPO"),
        ("task: ppo", "PPO"),
        (
            (
                "beta: 0.01\nmax_length: 1024\nmax_prompt_length: 512\noutput_dir:"
                " data/zephyr-7b-dpo-full"
            ),
            "DPO (",
        ),
        ("beta: 0.05\nmax_prompt_length: 1792\nhub_model_id: zephyr-orpo-141b-A35b", "ORPO ("),
        ("beta: 0.05\nloss_type: apo_zero", "DPO ("),
        ("loss_type: [sigmoid, bco_pair, sft]", "requires one of"),
        ("loss_type: dr_grpo", "GRPO ("),
        ("beta: 0.1\ndesirable_weight: 1.0\nundesirable_weight: 1.0", "KTO ("),
        ("precompute_ref_log_probs: false\nrpo_alpha: 1.0", "DPO ("),
        (
            (
                "reward_funcs: [accuracy]\nnum_generations: 8\nunknown_key_of_a_fork:"
                " 1\nmax_completion_length: 1024"
            ),
            "GRPO",
        ),
        ("reward_model_path: r\nrloo_k: 2\nkl_coef: 0.03", "RLOO ("),
        ("reward_model_path: r\nnum_ppo_epochs: 4\nkl_coef: 0.05", "PPO ("),
        ("center_rewards_coefficient: 0.01", "reward modeling"),
        ("teacher_model_name_or_path: t\nlmbda: 0.5\nbeta: 0.5", "GKD ("),
        ("kd_trainer: true\nkd_ce_alpha: 0.1", "knowledge distillation"),
        ("train_args: {beta: 0.1, max_prompt_length: 128, loss_type: ipo}", "DPO"),
        ("task_type: embedding", "embedding"),
        ("loss_type: infonce", "infonce"),
    ],
)
def test_rejects_unsupported_method_by_name(load: Load, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    message = caught.value.paragraph()
    assert expected in message.replace(
        "a training method that Paceline does not support, one of", "one of"
    )
    assert "the config has" not in message


@pytest.mark.parametrize(
    "data",
    [
        (
            "dataset_mixture: {datasets: [{id: a, split: s, columns: [chosen, rejected], weight:"
            " 1.0}]}"
        ),
        "datasets: [{path: a, type: bradley_terry.chat_template}]",
        "datasets: [{path: a, type: stepwise_supervised}]",
        "dataset: [{path: a, columns: {chosen: good, rejected: bad}}]",
    ],
)
def test_rejects_preference_data_by_its_columns(load: Load, data: str) -> None:
    with pytest.raises(ConfigError, match=r"requires .*training method"):
        load(f"model: m\n{data}\n")


@pytest.mark.parametrize(
    "text",
    [
        "loss_type: nll",
        "template: qwen\ntrl: {}",
        "loss_type: chunked_nll",
        "loss_type: dft",
        "rl:",
        "rl: false",
        "reward_model: false",
        "process_reward_model: false",
        "rlhf_type:",
        "beta:",
        "max_prompt_length:",
        "label_smoothing_factor: 0.1",
        "adam_beta1: 0.9",
        "completion_only_loss: true\nassistant_only_loss: true",
        "dpo_use_weighting: false",
        "log_completions: false",
        "wandb_log_unique_prompts: false",
        "use_asft_loss: true\nstage: sft\nref_model: base",
        "stage: sft\npref_beta: 0.1",
        "dataset: [{path: d, columns: {completion: label, prompt: text}}]",
    ],
)
def test_accepts_supervised_configs(load: Load, text: str) -> None:
    assert load((BASE if "dataset:" not in text else "model: m\n") + text).config.task == "sft"


def test_explicit_task_ignores_keys_of_other_methods(load: Load) -> None:
    loaded = load(BASE + "task: sft\nbeta: 0.1\n")
    assert any(level == "warning" and "`beta: 0.1`" in text for level, text in loaded.notices)
    loaded = load(BASE + "rl: dpo\nbeta: 0.1\n", ["task=sft"])
    warnings = [text for level, text in loaded.notices if level == "warning"]
    assert any("`rl: dpo`" in text for text in warnings)
    assert any("`beta: 0.1`" in text for text in warnings)
    with pytest.raises(ConfigError, match="DPO"):
        load(BASE + "task: sft\nrl: dpo\n")
    with pytest.raises(ConfigError, match="DPO"):
        load(BASE + "task: sft\n", ["rl=dpo"])


def test_disabled_logging_key_is_reported_as_ignored(load: Load) -> None:
    (notice,) = [
        notice
        for notice in load(BASE + "log_completions: false\n").notices
        if "log_completions" in notice[1]
    ]
    assert notice[0] == "info"
    with pytest.raises(ConfigError, match="GRPO"):
        load(BASE + "log_completions: true\n")


def test_short_key_is_unknown_instead_of_a_method(load: Load) -> None:
    for key in ("epsilon", "gamma", "delta"):
        with pytest.raises(ConfigError, match=f"unknown key `{key}`"):
            load(BASE + f"{key}: 0.2\n")


def test_rejects_every_single_key_of_unsupported_methods(load: Load) -> None:
    for key, (_, methods) in method_tables().keys.items():
        with pytest.raises(ConfigError, match="a training method that Paceline does not support"):
            load(BASE + f"{key}: 1\n")
        assert set(methods) <= set(method_tables().methods)
    for loss, methods in method_tables().losses.items():
        with pytest.raises(ConfigError, match="a training method that Paceline does not support"):
            load(BASE + f"loss_type: {loss}\n")
        assert set(methods) <= set(method_tables().methods)


def test_command_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(
        "model_name_or_path: builtin:qwen2-micro\ndataset_name: builtin:python-docs#8\nbeta:"
        " 0.1\noutput_dir: out\n"
    )
    assert "`beta: 0.1`" in run(str(file), cwd=tmp_path, expect=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dpo.yaml"]

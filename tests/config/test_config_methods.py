"""Test that configs for unsupported training methods are rejected, by name or by the keys of those
methods."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from raised import raises_error

from paceline.config.compat.keys import method_tables, task_of_method
from paceline.config.load import Loaded, load_config
from paceline.config.schema.tasks import ANSWER_TASKS, ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.rewards.builtin import build_reward

BASE = "model: m\ndataset: d\n"
Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rl: gdpo\ntrl: {num_generations: 4}\nvllm: {port: 8000}", "GDPO"),
        ("process_reward_model: true", "process reward modeling"),
        ("rlhf_type: gkd", "GKD"),
        ("stage: ppo\nreward_model: saves/reward", "PPO"),
        ("task: ppo", "PPO"),
        ("reward_model_path: r\nnum_ppo_epochs: 4\nkl_coef: 0.05", "PPO ("),
        ("teacher_model_name_or_path: t\nlmbda: 0.5\nbeta: 0.5", "GKD ("),
        ("kd_trainer: true\nkd_ce_alpha: 0.1", "knowledge distillation"),
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
    ("text", "task", "settings"),
    [
        ("rl: dpo", "dpo", {}),
        ("rl: ipo", "dpo", {"loss_type": ["ipo"]}),
        ("rl: kto\nkto_undesirable_weight: 0.5", "kto", {"undesirable_weight": 0.5}),
        ("rl: orpo\norpo_alpha: 0.2", "orpo", {"beta": 0.2}),
        ("rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 0.7", "simpo", {"beta": 2.0, "cpo_alpha": 1.0}),
        ("rl: simpo\ncpo_alpha: 0", "simpo", {"cpo_alpha": 0.0}),
        ("rlhf_type: dpo\nbeta: 0.2\nloss_type: hinge", "dpo", {"loss_type": ["hinge"]}),
        ("rlhf_type: dpo\nrpo_alpha: 0.3", "dpo", {"loss_weights": [1.0, 0.3]}),
        ("stage: dpo", "dpo", {}),
        ("stage: kto\nkto_chosen_weight: 0.5", "kto", {"desirable_weight": 0.5}),
        ("stage: dpo\npref_beta: 0.2\npref_loss: orpo", "orpo", {"beta": 0.2}),
        ("stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.7", "simpo", {"cpo_alpha": 0.0}),
        ("stage: dpo\npref_loss: hinge\npref_ftx: 0.5", "dpo", {"loss_type": ["hinge", "sft"]}),
        ("beta: 0.05\nloss_type: apo_zero", "dpo", {"loss_type": ["apo_zero"]}),
        ("beta: 0.1\ndesirable_weight: 1.3", "kto", {"desirable_weight": 1.3}),
        ("task: simpo\nbeta: 2.0", "simpo", {"beta": 2.0}),
        ("stage: rm", "reward", {"center_rewards_coefficient": None}),
        ("rlhf_type: rm", "reward", {}),
        ("reward_model: true\nnum_labels: 1", "reward", {}),
        ("center_rewards_coefficient: 0.01", "reward", {"center_rewards_coefficient": 0.01}),
        ("task: reward\ndisable_dropout: false", "reward", {"disable_dropout": False}),
        ("task: dpo\nprecompute_ref_log_probs: true\nsync_ref_model: false", "dpo", {}),
        ("rlhf_type: dpo\nref_model: m", "dpo", {}),
        ("lora_task_type: SEQ_CLS", "reward", {}),
        ("reward_model: true\nnum_labels: 1\nlora_task_type: SEQ_CLS", "reward", {}),
    ],
)
def test_reads_preference_training(
    load: Load, text: str, task: str, settings: dict[str, object]
) -> None:
    config = load(BASE + text).config
    assert config.task == task
    values = config.preference.model_dump()
    assert {name: values[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beta: 0.1", "state which one it is: add `task: dpo` or `task: orpo` or `task: kto`"),
        # Names of runs, repositories and folders do not choose the method.
        ("beta: 0.1\noutput_dir: data/zephyr-7b-dpo", "add `task: dpo` or `task: orpo`"),
        ("beta: 0.1\nhub_model_id: zephyr-orpo\nrun_name: orpo", "add `task: dpo` or `task: orpo`"),
        ("loss_type: [sigmoid, bco_pair, sft]", "one of several training methods"),
        ("rl: dpo\nuse_weighting: true", "not supported with `task: dpo`"),
        ("rl: dpo\nsync_ref_model: true", "not supported with `task: dpo`"),
        ("stage: dpo\npref_loss: kto_pair", "this loss is not supported"),
        ("stage: dpo\nref_model: other", "the reference is the model before training, and another"),
        ("stage: dpo\nld_alpha: 0.5", "`task: dpo`: length-desensitized DPO is not supported"),
        ("stage: dpo\ndpo_label_smoothing: 0.1", "smoothing of `loss_type: sigmoid` is not"),
        ("task_type: seq_cls\nnum_labels: 1", "one label is regression, which is not supported"),
        ("task_type: seq_cls\nproblem_type: regression", "regression is not supported"),
        ("lora_task_type: TOKEN_CLS", "adapters of language models (`CAUSAL_LM`)"),
        ("stage: kto\npref_ftx: 0.1", "not supported with `task: kto`"),
        ("stage: rm\npref_beta: 0.2", "preference.beta is not supported with task: reward"),
    ],
)
def test_rejects_what_preference_training_lacks(load: Load, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    assert expected in caught.value.paragraph()


@pytest.mark.parametrize(
    ("text", "task", "rewards", "settings"),
    [
        (
            "rlhf_type: grpo\nreward_funcs: [accuracy, format]",
            "grpo",
            [
                {"name": "math", "column": "solution"},
                {"name": "format", "pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"},
            ],
            {},
        ),
        (
            "task: rloo\nreward_funcs: [accuracy_reward]\nreward_model_name_or_path: ./r\n"
            "reward_weights: [0.5, 1]\nkl_coef: 0.1\ntemperature: 0.7\ntop_k: 5\nepsilon: 0.1",
            "rloo",
            [{"model": "./r", "weight": 0.5}, {"name": "math", "column": "solution"}],
            {"beta": 0.1, "temperature": 0.7, "top_k": 5, "epsilon": 0.1},
        ),
        (
            "rl: grpo\ntrl: {reward_funcs: [own.rewards.length], num_generations: 4,"
            " vllm_mode: colocate, multi_objective_aggregation: sum_then_normalize}",
            "grpo",
            [{"function": "own.rewards:length"}],
            {"num_generations": 4},
        ),
        (
            "loss_type: dr_grpo\nscale_rewards: false\nrewards: [{name: exact}]",
            "grpo",
            [{"name": "exact"}],
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
        ),
        (
            "rlhf_type: grpo\nreward_funcs: [cosine, repetition]\ncosine_max_len: 90\n"
            "cosine_max_len_value_wrong: -0.1\nrepetition_n_grams: 4",
            "grpo",
            [
                {
                    "name": "cosine",
                    "column": "solution",
                    "max_length": 90,
                    "correct": [1.0, 0.5],
                    "wrong": [-0.5, -0.1],
                },
                {"name": "repetition", "ngram_size": 4, "max_penalty": -1.0},
            ],
            {},
        ),
        (
            "task: grpo\nsystem_prompt: s\nreward_funcs: [cosine, reasoning_accuracy_reward]\n"
            "cosine_min_value_correct: 0.2",
            "grpo",
            [
                {
                    "name": "cosine",
                    "column": "solution",
                    "max_length": 1000,
                    "unit": "characters",
                    "correct": [1.0, 0.2],
                    "wrong": [0.0, -0.5],
                },
                {"name": "math", "column": "solution", "after": "</think>"},
            ],
            {},
        ),
        (
            "task: grpo\nsystem_prompt: s\nreward_funcs: soft_overlong_punishment\n"
            "soft_punish_cache: 9",
            "grpo",
            [{"name": "soft_overlong", "max_length": 16384, "cache": 9}],
            {},
        ),
        (
            "rlhf_type: grpo\nreward_funcs: soft_overlong\nsoft_cache_length: 9\n"
            "soft_max_length: 90",
            "grpo",
            [{"name": "soft_overlong", "max_length": 90, "cache": 9}],
            {},
        ),
    ],
)
def test_reads_rewards(
    load: Load,
    text: str,
    task: str,
    rewards: list[dict[str, object]],
    settings: dict[str, object],
) -> None:
    config = load(BASE + text).config
    assert config.task == task
    assert [reward.model_dump(exclude_defaults=True) for reward in config.rewards] == rewards
    assert config.grpo.model_dump(exclude_defaults=True) == settings


@pytest.mark.parametrize(
    ("name", "pattern", "flags"),
    [
        ("format", r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE),
        (
            "reasoning_steps",
            r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)",
            re.NOFLAG,
        ),
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "<think>\na\n</think>\n<answer>\nb\n</answer>",
        "<think>\na\n</think>\n<answer>\nb\n</answer>\n1. more\nFirst, a\n- b",
        "<think>\na\n</think>\n<answer>\nb\n</answer> more",
        "1. a\n2. b\nStep 3: c",
        "\n1. a\n* b\n- c\nNext, d",
        "",
    ],
)
def test_patterns_of_open_r1_match_as_in_open_r1(
    load: Load, name: str, pattern: str, flags: re.RegexFlag, text: str
) -> None:
    (entry,) = load(f"{BASE}task: grpo\nsystem_prompt: s\nreward_funcs: [{name}]").config.rewards
    expected = (
        float(bool(re.match(pattern, text, flags)))
        if name == "format"
        else min(1.0, len(re.findall(pattern, text)) / 3)
    )
    assert build_reward(entry, 100, 1.0)(completions=[text]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward_funcs: [code]", "needs a sandbox"),
        ("reward_funcs: [toolbench]", "it is not built in; write a reward function"),
        ("reward_funcs: [external_math]", "`external_math` is not a known reward"),
        ("reward_funcs: [accuracy]\nreward_weights: [1, 2]", "2 weights for 1 rewards"),
        ("reward_funcs: [accuracy]\nreward_model_plugin: p", "with TRL's signature"),
        ("reward_funcs: [accuracy]\nsync_ref_model: true", "is not updated"),
        ("reward_funcs: [accuracy]\nmax_turns: 3", "has no effect without environment"),
        ("reward_funcs: [accuracy]\nloss_type: bnpo", "divides by the number of tokens in a micro"),
        ("trl: {top_entropy_quantile: 0.2}", "`trl.top_entropy_quantile: 0.2`"),
        ("", "requires rewards"),
    ],
)
def test_rejects_what_training_with_rewards_lacks(load: Load, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{BASE}rlhf_type: grpo\n{text}")
    assert expected in caught.value.paragraph()


def test_folders_of_the_file_do_not_choose_the_method(tmp_path: Path) -> None:
    path = tmp_path / "dpo" / "orpo.yaml"
    path.parent.mkdir()
    path.write_text(BASE + "beta: 0.1")
    with pytest.raises(ConfigError, match="state which one it is: add `task: dpo` or"):
        load_config(path)


@pytest.mark.parametrize(
    "data",
    [
        (
            "dataset_mixture: {datasets: [{id: a, split: s, columns: [chosen, rejected], weight:"
            " 1.0}]}"
        ),
        "datasets: [{path: a, type: stepwise_supervised}]",
        "dataset: [{path: a, columns: {chosen: good, rejected: bad}}]",
    ],
)
def test_rejects_preference_data_by_its_columns(load: Load, data: str) -> None:
    with pytest.raises(ConfigError, match=r"(requires|belongs to) .*training method"):
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


@pytest.mark.parametrize(
    ("rl", "fields", "columns"),
    [
        (
            "dpo",
            "{field_prompt: q, field_chosen: good, field_rejected: bad, prompt_format: '{prompt}'}",
            {"prompt": "q", "chosen": "good", "rejected": "bad"},
        ),
        (
            "kto",
            "{field_prompt: q, field_completion: a, field_label: mark}",
            {"prompt": "q", "completion": "a", "label": "mark"},
        ),
    ],
)
def test_reads_fields_of_own_preference_data(
    load: Load, rl: str, fields: str, columns: dict[str, str]
) -> None:
    loaded = load(f"model: m\nrl: {rl}\ndatasets: [{{path: d, type: {fields}}}]")
    (source,) = loaded.config.sources()
    assert (source.format, source.columns) == ("auto", columns)
    assert ("prompt_format" in fields) == any(
        "`prompt_format`" in text for _, text in loaded.notices
    )


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        ("rl: dpo\nsample_packing: true", True),
        ("rlhf_type: orpo\npacking: true", True),
        ("rlhf_type: dpo\npadding_free: true", True),
        ("stage: dpo\nneat_packing: true", True),
        ("rlhf_type: rm\npacking: true", "auto"),
        ("rlhf_type: rm\npadding_free: true", "auto"),
        ("stage: rm\npacking: false", False),
    ],
)
def test_answers_of_a_micro_batch_are_packed(load: Load, text: str, packing: bool | str) -> None:
    args = load(BASE + text).config.train_args
    assert args.packing == packing
    assert not args.packs_rows


@pytest.mark.parametrize(
    ("text", "unused"),
    [
        ("task: dpo\npreference: {label_smoothing: 0.1, beta: 0.2}", ["label_smoothing"]),
        ("task: dpo\npreference: {label_smoothing: 0.1, loss_type: robust}", []),
        ("task: dpo\npreference: {discopop_tau: 0.1, simpo_gamma: 1.0}",
         ["discopop_tau", "simpo_gamma"]),
        ("task: simpo\npreference: {label_smoothing: 0.1, simpo_gamma: 1.0}", []),
        ("task: kto\npreference: {desirable_weight: 2.0, cpo_alpha: 1.0}", ["cpo_alpha"]),
        ("task: sft\npreference: {disable_dropout: false}", ["disable_dropout"]),
    ],
)  # fmt: skip
def test_reports_settings_that_the_task_does_not_use(
    load: Load, text: str, unused: list[str]
) -> None:
    config = load(BASE + text).config
    assert config.preference.unused(config.task) == unused


def test_explicit_task_ignores_keys_of_other_methods(load: Load) -> None:
    loaded = load(BASE + "task: sft\nbeta: 0.1\n")
    assert any(level == "warning" and "`beta: 0.1`" in text for level, text in loaded.notices)
    loaded = load(BASE + "rl: dpo\nbeta: 0.1\n", ["task=sft"])
    warnings = [text for level, text in loaded.notices if level == "warning"]
    assert any("`rl: dpo`" in text for text in warnings)
    assert any("`beta: 0.1`" in text for text in warnings)
    with raises_error(ConfigError, code="disagreement"):
        load(BASE + "task: sft\nrl: dpo\n")
    assert load(BASE + "task: sft\n", ["rl=dpo"]).config.task == "dpo"


def test_disabled_logging_key_is_reported_as_ignored(load: Load) -> None:
    (notice,) = [
        notice
        for notice in load(BASE + "log_completions: false\n").notices
        if "log_completions" in notice[1]
    ]
    assert notice[0] == "info"
    with raises_error(ConfigError, code="ambiguous-method"):
        load(BASE + "log_completions: true\n")


def test_short_key_is_unknown_instead_of_a_method(load: Load) -> None:
    for key in ("epsilon", "gamma", "delta"):
        with raises_error(ConfigError, code="unknown-key", naming=key):
            load(BASE + f"{key}: 0.2\n")


def test_no_single_key_of_another_method_trains_sft(load: Load) -> None:
    texts = {f"{key}: 1\n": methods for key, (_, methods) in method_tables().keys.items()}
    texts |= {f"loss_type: {loss}\n": methods for loss, methods in method_tables().losses.items()}
    for text, methods in texts.items():
        assert set(methods) <= set(method_tables().methods)
        try:
            task = load(BASE + text).config.task
        except ConfigError:  # the method, the value or the setting is not supported
            continue
        assert task in {*ANSWER_TASKS, *ROLLOUT_TASKS} & {*map(task_of_method, methods)}, text


def test_command_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(
        "model_name_or_path: builtin:qwen2-micro\ndataset_name: builtin:python-docs#8\nbeta:"
        " 0.1\noutput_dir: out\n"
    )
    assert "`beta: 0.1`" in run(str(file), cwd=tmp_path, expect=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dpo.yaml"]


def test_the_data_of_a_diffusion_model_do_not_set_the_task(load: Load) -> None:
    text = "base_model: m\npretraining_dataset: [{path: a}]\ndiffusion: {noise_schedule: cosine}\n"
    with raises_error(ConfigError, code="unsupported-method"):
        load(text)
    assert load(text, ["task=pretrain"]).config.task == "pretrain"

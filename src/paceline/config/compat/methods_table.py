"""Keys that only trainers of preference optimization, reinforcement learning, reward modeling or
distillation read.

Sources: the configuration classes of TRL's trainers, LLaMA-Factory's RLHF arguments, ms-swift's
RLHF arguments, and axolotl's configuration reference.
"""

from __future__ import annotations

METHODS = {
    "dpo": "DPO (direct preference optimization)",
    "ipo": "IPO (identity preference optimization)",
    "orpo": "ORPO (odds ratio preference optimization)",
    "kto": "KTO (Kahneman-Tversky optimization)",
    "cpo": "CPO (contrastive preference optimization)",
    "simpo": "SimPO (simple preference optimization)",
    "bco": "BCO (binary classifier optimization)",
    "online_dpo": "online DPO (direct preference optimization on generated answers)",
    "xpo": "XPO (exploratory preference optimization)",
    "nash_md": "Nash-MD (Nash learning from human feedback)",
    "ppo": "PPO (proximal policy optimization)",
    "rloo": "RLOO (REINFORCE leave-one-out)",
    "grpo": "GRPO (group relative policy optimization)",
    "gdpo": "GDPO (group reward-decoupled policy optimization)",
    "ebft": "EBFT (energy-based fine-tuning)",
    "rm": "reward modeling",
    "prm": "process reward modeling",
    "gkd": "GKD (generalized knowledge distillation)",
    "distillation": "knowledge distillation",
    "diffusion": "diffusion language modeling",
}

_GENERATING = "grpo rloo"
# methods → tools → keys. Names that may as well be a misspelling of another key (`epsilon`,
# `gamma`, …) are left out: a config of such a method has other keys by which it is recognized.
_GROUPS: list[tuple[str, dict[str, str]]] = [
    ("dpo orpo kto cpo bco online_dpo xpo nash_md grpo rloo gkd", {"st": "beta"}),
    ("dpo orpo kto cpo bco grpo", {"t": "max_prompt_length", "a": "max_prompt_len"}),
    ("dpo orpo kto cpo bco grpo rloo gkd", {"st": "max_completion_length"}),
    ("dpo orpo kto cpo bco", {"t": "is_encoder_decoder max_target_length generate_during_eval"}),
    ("dpo orpo kto cpo bco rm prm online_dpo gkd grpo rloo", {"t": "disable_dropout"}),
    ("dpo cpo", {"st": "label_smoothing"}),
    ("dpo kto bco", {
        "t": "precompute_ref_log_probs precompute_ref_batch_size ref_model_init_kwargs model_adapter_name ref_adapter_name",
    }),
    ("dpo kto grpo", {"st": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"}),
    ("dpo", {
        "t": "reference_free force_use_ref_model f_divergence_type f_alpha_divergence_coef use_weighting "
             "base_model_attribute_name loss_weights",
        "st": "rpo_alpha discopop_tau",
        "lst": "ld_alpha",
        "l": "pref_ftx dpo_label_smoothing",
        "a": "dpo_beta dpo_use_weighting dpo_use_logits_to_keep dpo_norm_loss dpo_padding_free dpo_generate_during_eval "
             "dpo_loss_type dpo_use_liger_kernel",
    }),
    ("dpo orpo simpo", {"l": "pref_beta pref_loss pref_bco_weight"}),
    ("dpo ipo orpo kto simpo", {"a": "rl_beta"}),
    ("orpo", {"a": "orpo_alpha"}),
    ("cpo simpo", {"ast": "cpo_alpha simpo_gamma"}),
    ("simpo", {"l": "simpo_gamma_beta_ratio"}),
    ("kto", {
        "st": "desirable_weight undesirable_weight",
        "l": "kto_chosen_weight kto_rejected_weight kto_ftx",
        "a": "kto_desirable_weight kto_undesirable_weight",
    }),
    ("bco", {"t": "prompt_sample_size min_density_ratio max_density_ratio"}),
    ("dpo ppo kto grpo", {
        "ls": "ref_model",
        "l": "ref_model_adapters ref_model_quantization_bit",
        "s": "ref_model_type ref_model_revision ref_adapters",
        "t": "ref_model_name_or_path",
    }),
    ("ppo", {
        "l": "ppo_buffer_size ppo_score_norm ppo_target ppo_whiten_rewards",
        "lt": "ppo_epochs",
        "t": "num_ppo_epochs vf_coef cliprange_value adap_kl_ctrl init_kl_coef kl_penalty target_kl ratio_threshold "
             "use_score_scaling use_score_norm score_clip query_dataset value_model_path value_model_name_or_path",
    }),
    ("ppo rloo", {
        "t": "total_episodes num_mini_batches cliprange kl_coef whiten_rewards response_length num_sample_generations "
             "local_rollout_forward_batch_size sft_model_path kl_estimator stop_token_id",
    }),
    ("rloo", {"t": "rloo_k token_level_kl normalize_advantage reward_clip_range normalize_reward"}),
    ("ppo rloo online_dpo xpo nash_md", {"t": "reward_model_path missing_eos_penalty stop_token"}),
    ("nash_md", {"t": "mixture_coef"}),
    ("online_dpo", {"t": "beta_list"}),
    ("ppo grpo rloo", {
        "lsa": "reward_model",
        "s": "reward_adapters reward_model_plugin",
        "l": "reward_model_adapters reward_model_quantization_bit reward_model_type",
        "t": "reward_model_name_or_path",
    }),
    (_GENERATING, {
        "st": "num_generations reward_funcs reward_weights num_iterations log_completions generation_batch_size "
              "steps_per_generation",
        "s": "reward_func num_infer_workers async_generate scale_rewards_by advantage_estimator kl_in_reward dynamic_sample",
    }),
    ("grpo", {
        "st": "scale_rewards importance_sampling_level top_entropy_quantile mask_truncated_completions",
        "t": "num_completions_to_print wandb_log_unique_prompts use_liger_loss multi_objective_aggregation "
             "ds3_gather_for_generation num_generations_eval off_policy_mask_threshold vllm_importance_sampling_correction",
    }),
    ("grpo rloo online_dpo gkd", {"st": "use_vllm"}),
    ("grpo dpo kto orpo simpo", {"a": "trl"}),
    ("grpo", {"a": "vllm"}),
    ("rm", {"ast": "center_rewards_coefficient"}),
    ("prm", {"t": "step_separator train_on_last_step_only", "a": "process_reward_model"}),
    ("gkd", {
        "t": "teacher_model_name_or_path teacher_model_init_kwargs",
        "s": "teacher_model teacher_model_type teacher_adapters teacher_model_revision sft_alpha",
        "st": "lmbda seq_kd",
    }),
    ("distillation", {
        "a": "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_top_k_before_softmax kd_online_server_base_url "
             "kd_online_topk kd_online_server kd_online_timeout kd_normalize_topk kd_beta",
    }),
    ("diffusion", {"a": "diffusion noise_schedule mask_token_id"}),
]  # fmt: skip

#: key → (letters of the tools, the methods that read it)
METHOD_KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    key: (tools, tuple(methods.split()))
    for methods, by_tools in _GROUPS
    for tools, keys in by_tools.items()
    for key in keys.split()
}

#: values of TRL's and ms-swift's `loss_type` → methods
LOSSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_pair",
            "aot_unpaired",
            "discopop",
            "apo_zero",
            "apo_down",
            "sigmoid_norm",
        ],
        ("dpo",),
    ),
    **dict.fromkeys(("sigmoid", "ipo"), ("dpo", "cpo", "online_dpo")),
    "hinge": ("dpo", "cpo"),
    "simpo": ("simpo",),
    "alphapo": ("cpo",),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), ("kto",)),
    "bco": ("bco",),
    **dict.fromkeys(
        ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "fipo", "real"],
        ("grpo",),
    ),
}
#: values of `loss_type` with which supervised fine-tuning is trained
SUPERVISED_LOSSES = (
    "nll",
    "chunked_nll",
    "dft",
    "cross_entropy",
    "causal_lm",
    "forcausallm",
    "none",
    "",
)

#: beginnings of axolotl's `type` of a source → methods
DATA_TYPES: dict[str, tuple[str, ...]] = {"bradley_terry": ("rm",), "stepwise_supervised": ("prm",)}

#: columns of preference data that a source lists → methods
DATA_COLUMNS: list[tuple[frozenset[str], tuple[str, ...]]] = [
    (frozenset({"chosen", "rejected"}), ("dpo", "orpo", "cpo", "rm")),
    (frozenset({"completion", "label"}), ("kto", "bco")),
]

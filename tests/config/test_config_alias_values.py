"""Test how the keys and values of other tools are read."""

from collections.abc import Callable
from typing import Any

import pytest
from raised import raises_error

from paceline.config.load import Loaded
from paceline.core.errors import ConfigError

BASE = "model: m\ndataset: d\n"
Load = Callable[..., Loaded]


def config_value(loaded: Loaded, key: str) -> Any:
    value: Any = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lora_r: 16", "lora.rank", 16),
        (
            "train_type: lora\nquant_method: bnb\nbatch_size: 3",
            "train_args.per_device_train_batch_size",
            3,
        ),
        ("sequence_len: 16\nbatch_size: 3", "train_args.per_device_train_batch_size", 4),
        ("eval_strategy: 'no'\nval_dataset: v", "train_args.eval_steps", "never"),
        ("eval_strategy: no\nval_size: 0.1\neval_steps: 5", "train_args.eval_steps", "never"),
        ("eval_strategy: 'no'", "train_args.eval_steps", 0),
        ("activation_cpu_offload: true", "parallel.cpu_offload", "activations"),
        ("train_iters: 7", "train_args.max_steps", 7),
        ("lr_warmup_fraction: 0.1", "train_args.warmup_ratio", 0.1),
        ("min_lr: 1e-6", "train_args.lr_scheduler_kwargs", {"min_lr": 1e-6}),
        ("lr_decay_style: linear\nmin_lr: 1e-6", "train_args.lr_scheduler_kwargs", {}),
        ("recompute_granularity: selective", "train_args.gradient_checkpointing", "selective"),
        ("recompute_granularity: none", "train_args.gradient_checkpointing", "none"),
        ("metric_for_best_model: rouge-l", "train_args.metric_for_best_model", "rougeL"),
        ("metric_for_best_model: eval_rouge-2", "train_args.metric_for_best_model", "rouge2"),
        ("metric_for_best_model: token_acc", "evaluation.metrics", ["token_accuracy"]),
        ("stage: sft\ncallbacks: [early_stop, ./a.py:B]", "callbacks", ["./a.py:B"]),
        (
            "packing: true\npacking_strategy: ffd\nstage: sft",
            "train_args.packing_strategy",
            "bfd",
        ),
        ("packing_strategy: ffd", "train_args.packing_strategy", "bfd"),
        ("train_args: {packing_strategy: bfd_split}", "train_args.packing_strategy", "bfd"),
        ("stage: sft\npacking_strategy: ffd", "train_args.packing_strategy", "micro_batch"),
        ("lora_rank: 16", "lora.rank", 16),
        ("lora: {r: 16}", "lora.rank", 16),
        ("lora: {lora_r: 16}", "lora.rank", 16),
        ("train_args: {lora_r: 16}", "lora.rank", 16),
        ("lora_alpha: 16", "lora.alpha", 16),
        ("lora_dropout: 0", "lora.dropout", 0),
        ("finetuning_type: lora", "lora.enable", True),
        ("add_special_tokens: <a>,<b>", "new_special_tokens", ["<a>", "<b>"]),
        ("add_tokens: x", "new_tokens", ["x"]),
        (
            "freeze_parameters_ratio: 1\ntrainable_parameters: [lm_head]",
            "train_args.trainable",
            ["^lm_head"],
        ),
        ("trainable_parameters: [lm_head]", "train_args.trainable", []),
        (
            "freeze_parameters: [model]\ntrainable_parameters: [model.norm]",
            "train_args.freeze",
            [r"^(?!.*?(?:^model\.norm))(?=.*?(?:^model))"],
        ),
        ("tokens: [x, y]", "new_tokens", ["x", "y"]),
        ("finetuning_type: full", "lora.enable", False),
        ("tuner_type: lora", "lora.enable", True),
        ("train_type: full", "lora.enable", False),
        ("adapter: lora", "lora.enable", True),
        ("adapter: qlora", "lora.enable", True),
        ("adapter: ./a", "lora.adapter", "./a"),
        ("lora: {adapter: lora}", "lora.adapter", "lora"),
        ("lora_model_dir: ./a", "lora.adapter", "./a"),
        ("adapter_name_or_path: ./a", "lora.enable", True),
        ("adapters: [./a]", "lora.adapter", "./a"),
        ("use_peft: true", "lora.enable", True),
        ("lora_target: all", "lora.target_modules", "all-linear"),
        ("lora_target: q,v", "lora.target_modules", ["q", "v"]),
        ("target_modules: [q, v]", "lora.target_modules", ["q", "v"]),
        ("target_modules: all-linear", "lora.target_modules", "all-linear"),
        (
            "target_modules: [all-linear, embed_tokens, lm_head]",
            "lora.target_modules",
            "all-linear",
        ),
        (
            "target_modules: [all-linear, embed_tokens, lm_head]",
            "lora.modules_to_save",
            ["embed_tokens", "lm_head"],
        ),
        ("target_modules: [all-linear, q_proj]", "lora.modules_to_save", []),
        (
            "lora_target: all,lm_head\nadditional_target: embed_tokens",
            "lora.modules_to_save",
            ["embed_tokens", "lm_head"],
        ),
        (
            "lora_target_linear: true\nlora_target_modules: [q_proj, lm_head]",
            "lora.modules_to_save",
            ["lm_head"],
        ),
        ("lora_target_modules: '.*(q|v)_proj'", "lora.target_modules", ".*(q|v)_proj"),
        (
            "lora_target_modules: 'layers.[\\d]+.q_{1,2}'",
            "lora.target_modules",
            "layers.[\\d]+.q_{1,2}",
        ),
        ("target_regex: '^a$'\ntarget_modules: [q]", "lora.target_modules", "^a$"),
        ("lora: {target_modules: 'q,v'}", "lora.target_modules", ["q", "v"]),
        ("lora: {target_modules: q}", "lora.target_modules", ["q"]),
        ("lora_target_modules: []", "lora.target_modules", "all-linear"),
        ("lora_target_linear: false\nlora_target_modules: [q]", "lora.target_modules", ["q"]),
        ("lora_target_linear: true", "lora.target_modules", "all-linear"),
        ("lora_target_linear: true\nlora_target_modules: [q]", "lora.target_modules", "all-linear"),
        ("lora_modules_to_save: [lm_head]", "lora.modules_to_save", ["lm_head"]),
        ("additional_target: a,b", "lora.modules_to_save", ["a", "b"]),
        ("cutoff_len: 64", "train_args.max_length", 64),
        ("sequence_len: 64", "train_args.max_length", 64),
        ("max_seq_length: 64", "train_args.max_length", 64),
        ("max_length: 64", "train_args.max_length", 64),
        ("model_max_length: 64", "train_args.max_length", 64),
        ("train_args: {cutoff_len: 64}", "train_args.max_length", 64),
        ("micro_batch_size: 2", "train_args.per_device_train_batch_size", 2),
        ("eval_batch_size: 2", "train_args.per_device_eval_batch_size", 2),
        ("per_device_train_batch_size: 2", "train_args.per_device_train_batch_size", 2),
        ("num_epochs: 2", "train_args.num_train_epochs", 2),
        ("num_train_epochs: 2", "train_args.num_train_epochs", 2),
        ("max_steps: -1", "train_args.max_steps", None),
        ("val_size: 0.1", "split_dataset_ratio", 0.1),
        ("val_size: 100", "split_dataset_ratio", 100),
        ("val_set_size: 100.0", "split_dataset_ratio", 100),
        ("test_split_size: 2000", "split_dataset_ratio", 2000),
        ("save_total_limit: -1", "train_args.save_total_limit", None),
        ("save_steps: 0.25", "train_args.save_steps", 0.25),
        ("eval_steps: 0.1", "train_args.eval_steps", 0.1),
        ("logging_steps: 0.5", "train_args.logging_steps", 0.5),
        ("saves_per_epoch: 2\nnum_epochs: 5", "train_args.save_steps", 0.1),
        ("saves_per_epoch: 1\nnum_epochs: 1", "train_args.save_steps", 0),
        ("saves_per_epoch: 4\nmax_steps: 10\nnum_epochs: 1", "train_args.save_steps", 0.25),
        ("saves_per_epoch: 0", "train_args.save_steps", 500),
        ("evals_per_epoch: 4\nnum_epochs: 1", "train_args.eval_steps", 0.25),
        ("evals_per_epoch: 1\nnum_epochs: 4", "train_args.eval_steps", 0),
        ("save_strategy: epoch\nnum_train_epochs: 4", "train_args.save_steps", 0.25),
        ("save_strategy: epoch\nnum_train_epochs: 2\nsave_steps: 50", "train_args.save_steps", 0.5),
        ("val_set_size: 0.1", "split_dataset_ratio", 0.1),
        ("val_set_size: 0", "split_dataset_ratio", 0),
        ("lr_scheduler: cosine", "train_args.lr_scheduler_type", "cosine"),
        ("lr_scheduler_type: LINEAR", "train_args.lr_scheduler_type", "linear"),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: '{\"min_lr\": 1e-6}'",
            "train_args.lr_scheduler_kwargs",
            {"min_lr": 1e-6},
        ),
        ("lr: 1e-4", "train_args.learning_rate", 1e-4),
        ("optim: adamw_torch", "train_args.optim", "adamw"),
        ("optim: adamw_torch_fused", "train_args.optim", "adamw"),
        ("optimizer: adamw_bnb_8bit", "train_args.optim", "adamw_8bit"),
        ("optimizer: paged_adamw_8bit", "train_args.optim", "paged_adamw_8bit"),
        ("optim: adamw_torch_8bit", "train_args.optim", "adamw_torchao_8bit"),
        ("optim: lion_32bit", "train_args.optim", "lion"),
        ("optimizer: muon", "train_args.optim", "muon"),
        ("optimizer: optimi_adamw", "train_args.optim", "adamw"),
        ("use_muon: true", "train_args.optim", "muon"),
        ("use_muon: false", "train_args.optim", "adamw"),
        ("optimizer: paged_adamw_32bit", "train_args.optim", "adamw"),
        ("optimizer: adamw_hf", "train_args.optim", "adamw"),
        ("optimizer: adafactor", "train_args.optim", "adafactor"),
        ("optimizer: sgd", "train_args.optim", "sgd"),
        ("torch_dtype: bfloat16", "train_args.precision", "bf16-mixed"),
        ("torch_dtype: float16", "train_args.precision", "fp16-mixed"),
        ("torch_dtype: float32", "train_args.precision", "32"),
        ("torch_dtype: float32\nbf16: true", "train_args.precision", "bf16-mixed"),
        ("torch_dtype: bfloat16\nbf16: true", "train_args.precision", "bf16-mixed"),
        ("bf16: auto", "train_args.precision", "auto"),
        ("fp16: 'true'", "train_args.precision", "fp16-mixed"),
        ("gradient_checkpointing: unsloth", "train_args.gradient_checkpointing", "full"),
        ("activation_checkpointing: true", "train_args.gradient_checkpointing", "full"),
        ("torch_compile: auto", "train_args.torch_compile", True),
        (
            "torch_compile_mode: max-autotune",
            "train_args.torch_compile_mode",
            "max-autotune-no-cudagraphs",
        ),
        ("enable_liger_kernel: true", "train_args.use_liger_kernel", True),
        ("use_liger: 'true'", "train_args.use_liger_kernel", True),
        ("liger_rope: true\nliger_rms_norm: true", "train_args.use_liger_kernel", True),
        ("liger_swiglu: false", "train_args.use_liger_kernel", False),
        ("flash_attn: fa2", "train_args.attn_implementation", "flash_attention_2"),
        ("flash_attn: disabled", "train_args.attn_implementation", "eager"),
        ("flash_attn: auto", "train_args.attn_implementation", "auto"),
        ("attn_impl: flash_attn", "train_args.attn_implementation", "auto"),
        ("attn_impl: flash_attention_3", "train_args.attn_implementation", "flash_attention_3"),
        ("attn_implementation: a/kernel", "train_args.attn_implementation", "auto"),
        ("flash_attention: true", "train_args.attn_implementation", "auto"),
        (
            "flash_attention: true\nattn_implementation: flash_attention_2",
            "train_args.attn_implementation",
            "flash_attention_2",
        ),
        ("sdp_attention: true", "train_args.attn_implementation", "sdpa"),
        ("flex_attention: false", "train_args.attn_implementation", "auto"),
        ("eager_attention: true", "train_args.attn_implementation", "eager"),
        ("padding_free: true", "train_args.packing", True),
        ("sample_packing: true", "train_args.packing", True),
        ("neat_packing: true", "train_args.packing", True),
        ("save_strategy: no", "train_args.save_steps", 0),
        ("save_strategy: best", "train_args.save_best", True),
        ("early_stopping_patience: 4", "train_args.early_stopping.patience", 4),
        ("early_stopping_threshold: 0.1", "train_args.early_stopping.min_delta", 0.1),
        ("early_stopping_steps: 4", "train_args.early_stopping.patience", 4),
        ("early_stop_interval: 4", "train_args.early_stopping.patience", 4),
        ("save_strategy: 'no'\nsave_steps: 50", "train_args.save_steps", 0),
        ("eval_strategy: epoch\neval_steps: 50", "train_args.eval_steps", 0),
        ("evaluation_strategy: steps\neval_steps: 50", "train_args.eval_steps", 50),
        ("warmup_steps: 0.1", "train_args.warmup_ratio", 0.1),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", "train_args.warmup_steps", None),
        ("truncation_strategy: delete", "train_args.truncation_strategy", "drop"),
        ("train_on_prompt: true", "train_args.train_on_inputs", True),
        ("completion_only_loss: false", "train_args.train_on_inputs", True),
        ("loss_scale: all", "train_args.train_on_inputs", True),
        ("loss_scale: last_round", "train_args.train_on_turns", "last"),
        ("mask_history: true", "train_args.train_on_turns", "last"),
        ("mask_history: false", "train_args.train_on_turns", "all"),
        ("roles_to_train: [gpt, assistant]", "train_args.train_on_turns", "all"),
        ("noisy_embedding_alpha: 5", "train_args.neftune_noise_alpha", 5.0),
        ("finetuning_type: freeze", "train_args.trainable_layers", 2),
        (
            "finetuning_type: freeze\nfreeze_extra_modules: a.b,c",
            "train_args.trainable",
            [r"a\.b", "c"],
        ),
        ("finetuning_type: full\nfreeze_extra_modules: a", "train_args.trainable", []),
        ("adapter: lora\nunfrozen_parameters: [a]", "train_args.trainable", []),
        ("max_packed_sequence_len: 2048", "train_args.max_length", 2048),
        ("max_packed_sequence_len: 2048", "train_args.packing_strategy", "bfd"),
        ("adam_eps: 1e-9", "train_args.adam_epsilon", 1e-9),
        ("eta_min: 7e-7", "train_args.lr_scheduler_kwargs", {"min_lr": 7e-7}),
        ("cosine_min_lr_ratio: 0.1", "train_args.lr_scheduler_type", "cosine_with_min_lr"),
        ("lr_scheduler: linear\neta_min: 7e-7", "train_args.lr_scheduler_type", "linear"),
        ("float16: true\nfp16: false", "train_args.precision", "fp16-mixed"),
        ("use_4bit: true", "lora.quantize", "nf4"),
        ("per_gpu_train_batch_size: 3", "train_args.per_device_train_batch_size", 3),
        ("validation_split_percentage: 5", "split_dataset_ratio", 0.05),
        ("selective_checkpointing: true", "train_args.gradient_checkpointing", "selective"),
        ("unfrozen_parameters: [lm_head]", "train_args.trainable", ["^(?:lm_head)"]),
        ("freeze_parameters: [model.a]", "train_args.freeze", ["^model\\.a"]),
        ("freeze_parameters_regex: a.*", "train_args.freeze", ["a.*"]),
        (
            "lr_groups: [{name: a, modules: [b], lr: 1e-5}]",
            "train_args.parameter_groups",
            [{"params": ["b"], "learning_rate": 1e-5}],
        ),
        (
            "embedding_lr: 1e-5",
            "train_args.parameter_groups",
            [{"params": ["embed_tokens", "lm_head"], "learning_rate": 1e-5, "weight_decay": 0.0}],
        ),
        (
            "learning_rate: 1e-4\nembedding_lr_scale: 0.1",
            "train_args.parameter_groups",
            [{"params": ["embed_tokens", "lm_head"], "learning_rate": 1e-5, "weight_decay": 0.0}],
        ),
        ("train_on_eos: turn", "train_args.train_on_turns", "all"),
        ("report_to: none", "report_to", []),
        ("report_to: [tensorboard, wandb, dvclive]", "report_to", ["tensorboard", "wandb"]),
        ("use_wandb: true\nuse_mlflow: true", "report_to", ["wandb", "mlflow"]),
        ("wandb_project: trials", "report_to", ["wandb"]),
        ("wandb_project: trials", "train_args.project", "trials"),
        ("swanlab_exp_name: first", "train_args.run_name", "first"),
        ("report_to: all", "report_to", ["tensorboard"]),
        ("resume_from_checkpoint: true", "resume", "auto"),
        ("resume_from_checkpoint: false", "resume", "never"),
        ("resume_from_checkpoint: a/b", "resume", "a/b"),
        ("nproc_per_node: 2", "parallel.num_gpus", 2),
        ("NPROC_PER_NODE: 2", "parallel.num_gpus", 2),
        ("use_cpu: true", "parallel.device", "cpu"),
        ("no_cuda: false", "parallel.device", "auto"),
        ("ddp_bucket_cap_mb: 50", "parallel.bucket_cap_mb", 50),
        ("stage: pt", "task", "pretrain"),
        ("stage: sft", "task", "sft"),
        ("default_system: hi", "system", "hi"),
        ("tokenizer_name_or_path: t", "tokenizer", "t"),
        ("save_total_limit: 0", "train_args.save_total_limit", None),
        ("max_samples: 5", "dataset", "d#5"),
        ("train_args: {output_dir: o}", "output_dir", "o"),
        ("model_name: other", "model", "m"),
        ("template: qwen\nchat_template: chatml", "chat_template", "chatml"),
        ("template: qwen2_5", "chat_template", "qwen"),
        ("template: LLAMA3", "chat_template", "llama3"),
        ("template: llama3_2", "chat_template", "llama3"),
        ("template_type: chatml", "chat_template", "chatml"),
        ("template: something_else", "chat_template", None),
        ("template:", "chat_template", None),
        ("stage: sft\nchat_template: phi_3", "chat_template", "phi3"),
        ("stage: sft\nchat_template: tokenizer_default", "chat_template", "tokenizer_default"),
        (
            "stage: sft\nchat_template: tokenizer_default_fallback_chatml",
            "chat_template",
            "tokenizer_default_fallback_chatml",
        ),
        (
            "chat_template: jinja\nchat_template_jinja: '{{ messages }}'",
            "chat_template",
            "{{ messages }}",
        ),
        ("chat_template_jinja: ./t.jinja", "chat_template", "./t.jinja"),
        (
            "stage: sft\nchat_template: '{% for m in messages %}{% endfor %}'",
            "chat_template",
            "{% for m in messages %}{% endfor %}",
        ),
        ("chat_template_path: ./t.jinja", "chat_template", "./t.jinja"),
        ("eval_dataset: v", "val_dataset", "v"),
        ("test_datasets: [{path: v}]", "val_dataset", [{"path": "v"}]),
        ("eval_dataset: []", "val_dataset", None),
        ("freeze_mm_modules: false", "vision.freeze_vision_tower", False),
        ("freeze_mm_modules: true", "vision.freeze_multi_modal_projector", True),
        ("freeze_vit: false", "vision.freeze_vision_tower", False),
        (
            "finetuning_type: freeze\nfreeze_trainable_layers: 4",
            "train_args.trainable_layers",
            4,
        ),
        ("finetuning_type: full\nfreeze_trainable_layers: 2", "train_args.trainable_layers", None),
        ("finetuning_type: lora\nfreeze_trainable_layers: 2", "train_args.trainable_layers", None),
        (
            "special_tokens: {pad_token: <p>, additional_special_tokens: [<x>, <y>]}",
            "new_special_tokens",
            ["<x>", "<y>"],
        ),
        ("special_tokens: {pad_token: <p>, eos_token: <e>}", "new_special_tokens", ["<e>"]),
        (
            "special_tokens: {bos_token: <b>, additional_special_tokens: [<x>]}",
            "new_special_tokens",
            ["<x>", "<b>"],
        ),
        ("special_tokens: {eos_token: <e>}", "eos_token", "<e>"),
        ("special_tokens: {bos_token: <b>}", "bos_token", "<b>"),
        ("special_tokens: {pad_token: <p>}", "new_special_tokens", []),
        ("base_model: m\nspecial_tokens: {eos_token: }", "eos_token", None),
        ("special_tokens:", "new_special_tokens", []),
    ],
)
def test_reads_aliased_values(load: Load, text: str, key: str, value: Any) -> None:
    loaded = load(BASE + text)
    actual = config_value(loaded, key)
    if isinstance(actual, list) and actual and hasattr(actual[0], "model_dump"):
        actual = [source.model_dump(exclude_defaults=True) for source in actual]
    assert actual == value
    if not text.startswith(
        (
            "max_length",
            "per_device",
            "num_train",
            "save_total",
            "max_steps",
            "report_to: none",
            "lora: {adapter",
            "save_steps",
            "eval_steps",
            "logging_steps",
        )
    ):
        assert loaded.notices, "a key was read under another name without a notice"


@pytest.mark.parametrize(
    "spelling", ["model_name_or_path", "base_model", "model_id_or_path", "model_name"]
)
def test_reads_aliases_of_model(load: Load, spelling: str) -> None:
    loaded = load(f"{spelling}: x\ndataset: d")
    assert loaded.config.model == "x"
    assert loaded.notices[0][1].startswith(f"`{spelling}: x` (")
    assert loaded.notices[0][1].endswith("is read as `model: x`")


@pytest.mark.parametrize(
    ("text", "shuffle"),
    [
        ("shuffle: false", False),
        ("train_args: {shuffle: false}", False),
        ("dataset_shuffle: false", False),
        ("dataset_shuffle: true", True),
        ("train_dataloader_shuffle: false", False),
        ("dataset_shuffle: true\ntrain_dataloader_shuffle: false", False),
        ("dataset_shuffle: false\ntrain_dataloader_shuffle: true", True),
        ("shuffle_merged_datasets: false", False),
        ("curriculum_sampling: true", False),
        ("curriculum_sampling: false", True),
        ("shuffle_dataset: false", False),
        ("disable_shuffling: true", False),
        ("disable_shuffling: false", True),
        ("train_sampling_strategy: sequential", False),
        ("train_sampling_strategy: random", True),
        ("train_sampling_strategy: group_by_length", True),
    ],
)
def test_reads_aliases_of_shuffle(load: Load, text: str, shuffle: bool) -> None:
    loaded = load(BASE + text)
    assert loaded.config.train_args.shuffle is shuffle
    assert any(level == "warning" for level, _ in loaded.notices) == ("group_by_length" in text)


def test_patterns_of_the_wrong_type_are_one_error(load: Load) -> None:
    text = "freeze_parameters_regex: true\ntrainable_parameters: [lm_head]\n"
    with raises_error(ConfigError, code="wrong-type", naming="freeze_parameters_regex"):
        load(BASE + text)

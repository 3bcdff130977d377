"""Keys of ms-swift (s), LLaMA-Factory (l), axolotl (a) and TRL with transformers (t) that are read
as keys of Paceline."""

from __future__ import annotations

from paceline.config.compat import conversion as c
from paceline.config.compat import llamafactory_v1 as v1
from paceline.config.compat import lora as lora
from paceline.config.compat import parallel_values as pv
from paceline.config.compat import precision as p
from paceline.config.compat import values as v
from paceline.config.compat.datasets import (
    eval_sources,
    mixture,
    mixture_by_share,
    pretraining_sources,
    train_sources,
)
from paceline.config.compat.keys import Alias

_T = "train_args."
_TARGETS = "`all` as `all-linear`; text with commas as a list; a regular expression as it is"
_MIXED = "`bf16` as `bf16-mixed`, `fp16` as `fp16-mixed`, `no` as `32`"
_DTYPE = (
    "`bfloat16` as `bf16-mixed`, `float16` as `fp16-mixed`, `auto`; `float32` as `32` if no other"
    " key sets it"
)
_PREFERENCE = (
    "dpo",
    "kto",
    "ppo",
    "grpo",
    "orpo",
    "rm",
    "rlhf",
    "gkd",
    "cpo",
    "simpo",
    "reward",
    "pt",
    "instruct",
)
_CHAT = "`task: sft` uses the chat template; for plain text use `task: pretrain`"

ALIASES: dict[str, Alias] = {
    # -- model
    "model_name_or_path": Alias("model", "lt", c.to("model")),
    "base_model": Alias("model", "a", c.to("model")),
    "model_id_or_path": Alias("model", "s", c.to("model")),
    "model_id": Alias("model", "s", c.to("model")),
    "model_name": Alias(
        "model", "ts", c.weakly("model"), "gives way to any other name of the model"
    ),
    "use_hf": Alias("use_modelscope", "s", c.inverse("use_modelscope"), "with the opposite sense"),
    "model_path": Alias("model", "t", c.to("model")),
    "tokenizer_name_or_path": Alias("tokenizer", "t", c.to("tokenizer")),
    "tokenizer_name": Alias("tokenizer", "t", c.to("tokenizer")),
    "tokenizer_path": Alias("tokenizer", "l", c.to("tokenizer")),
    "tokenizer_config": Alias("tokenizer", "a", c.to("tokenizer")),
    # -- task
    "stage": Alias(
        "task", "l", v.task, "`sft`, or `pt` as `pretrain`; preference training is refused"
    ),
    "task_type": Alias("task", "st", v.causal_only, "`causal_lm`; others are refused"),
    "rlhf_type": Alias("task", "s", v.preference, "refused: Paceline has no preference training"),
    "rl": Alias("task", "a", v.preference, "refused: Paceline has no preference training"),
    # -- data
    "datasets": Alias(
        "dataset",
        "at",
        train_sources,
        "each `{path, type, split, name, ...}` as `{path, format, ...}`",
    ),
    "dataset_name": Alias("dataset", "t", train_sources),
    "dataset_name_or_path": Alias("dataset", "t", train_sources),
    "dataset_id": Alias("dataset", "t", train_sources),
    "dataset_path": Alias("dataset", "t", train_sources),
    "dataset_mixture": Alias(
        "dataset", "t", mixture, "`datasets`, and `test_split_size` as `split_dataset_ratio`"
    ),
    "dataset_mixer": Alias(
        "dataset", "t", mixture_by_share, "all rows of each; shares are named as ignored"
    ),
    "custom_train_dataset_path": Alias("dataset", "s", train_sources),
    "pretraining_dataset": Alias(
        "dataset", "a", pretraining_sources, "with `task: pretrain` and `format: text`"
    ),
    "dataset_config": Alias("dataset", "t", c.to("_name"), "the `name` of each source"),
    "dataset_config_name": Alias("dataset", "t", c.to("_name"), "the `name` of each source"),
    "dataset_splits": Alias(
        "dataset",
        "t",
        c.to("_listed_splits"),
        "`split` of each source: with `train`, or with `test`",
    ),
    "dataset_configs": Alias(
        "dataset", "t", c.to("_listed_configs"), "the `name` of each source, in order"
    ),
    "dataset_train_split": Alias("dataset", "t", c.to("_split"), "the `split` of each source"),
    "dataset_split": Alias("dataset", "t", c.to("_split"), "the `split` of each source"),
    "dataset_text_field": Alias(
        "dataset",
        "t",
        c.to("_text_field"),
        "`columns: {text: ...}` of each source, where not `text`",
    ),
    "dataset_dir": Alias(
        "dataset",
        "l",
        c.to("_dataset_dir"),
        "where names of datasets are files in that folder, these",
    ),
    "max_samples": Alias(
        "dataset", "l", c.to("_max_samples"), "`path#N` for each source that has none"
    ),
    "train_dataset_sample": Alias(
        "dataset", "s", c.to("_max_samples"), "`path#N` for each source that has none"
    ),
    "train_dataset": Alias(
        "dataset", "l", v1.train_dataset, "a YAML file that lists data sets, a file, or a hub id"
    ),
    "eval_dataset": Alias("val_dataset", "lt", v1.eval_dataset),
    "test_datasets": Alias("val_dataset", "a", eval_sources),
    "custom_val_dataset_path": Alias("val_dataset", "s", eval_sources),
    "dataset_test_split": Alias(
        "val_dataset", "t", c.to("_test_split"), "the same source with that split"
    ),
    "val_size": Alias("split_dataset_ratio", "l", v.ratio, "a share below 1, or a number of rows"),
    "val_set_size": Alias(
        "split_dataset_ratio", "a", v.ratio, "a share below 1, or a number of rows"
    ),
    "test_split_size": Alias(
        "split_dataset_ratio", "t", v.ratio, "a share below 1, or a number of rows"
    ),
    "dataset_test_ratio": Alias("split_dataset_ratio", "s", v.ratio),
    "default_system": Alias("system", "l", c.to("system")),
    "default_system_message": Alias("system", "a", c.to("system")),
    "system_prompt": Alias("system", "t", c.to("system")),
    "system_message": Alias("system", "t", c.to("system")),
    "chat_template_jinja": Alias(
        "chat_template", "a", v.chat_template, "a file, or the template itself"
    ),
    "chat_template_path": Alias(
        "chat_template", "t", v.chat_template, "a file, or a local folder of a tokenizer"
    ),
    "chat_template_name": Alias("chat_template", "t", v.chat_template, "a named template"),
    "template": Alias(
        "chat_template", "sl", v.template_name, "a named template; gives way to `chat_template`"
    ),
    "template_type": Alias(
        "chat_template", "s", v.template_name, "a named template; gives way to `chat_template`"
    ),
    # -- run
    "resume_from_checkpoint": Alias(
        "resume", "slat", v.resume, "true as `auto`, false as `never`, or a path"
    ),
    "auto_resume_from_checkpoints": Alias(
        "resume", "a", v.resume, "true as `auto`, false as `never`"
    ),
    "use_tensorboard": Alias("report_to", "a", v.tensorboard),
    # -- devices
    "nproc_per_node": Alias("parallel.num_gpus", "s", v.ranks),
    "NPROC_PER_NODE": Alias("parallel.num_gpus", "s", v.ranks),
    "num_processes": Alias("parallel.num_gpus", "c", pv.num_processes, "divided by `num_machines`"),
    "nnodes": Alias("parallel.nnodes", "s", c.to("parallel.nnodes")),
    "NNODES": Alias("parallel.nnodes", "s", c.to("parallel.nnodes")),
    "num_machines": Alias("parallel.nnodes", "c", c.to("parallel.nnodes")),
    "node_rank": Alias("parallel.node_rank", "s", c.to("parallel.node_rank")),
    "NODE_RANK": Alias("parallel.node_rank", "s", c.to("parallel.node_rank")),
    "machine_rank": Alias("parallel.node_rank", "c", c.to("parallel.node_rank")),
    "master_addr": Alias("parallel.rdzv_endpoint", "s", c.to("parallel.rdzv_endpoint")),
    "MASTER_ADDR": Alias("parallel.rdzv_endpoint", "s", c.to("parallel.rdzv_endpoint")),
    "main_process_ip": Alias("parallel.rdzv_endpoint", "c", c.to("parallel.rdzv_endpoint")),
    "use_cpu": Alias("parallel.device", "tc", v.cpu, "true as `cpu`"),
    "no_cuda": Alias("parallel.device", "t", v.cpu, "true as `cpu`"),
    "device": Alias("parallel.device", "at", c.to("parallel.device")),
    "device_map": Alias(
        "parallel.device", "sat", v.device_map, "`cpu`; others are named as ignored"
    ),
    "ddp_bucket_cap_mb": Alias("parallel.bucket_cap_mb", "at", c.to("parallel.bucket_cap_mb")),
    # -- strategy
    "deepspeed": Alias(
        "parallel.mode", "slat", pv.deepspeed, "a JSON, a mapping, or `zero0` … `zero3_offload`"
    ),
    "deepspeed_config": Alias(
        "parallel.mode", "tc", pv.deepspeed_config, "a JSON, or `{zero_stage: 3, ...}`"
    ),
    "zero_stage": Alias("parallel.mode", "c", pv.zero_stage, "`deepspeed` with that stage"),
    "fsdp": Alias(
        "parallel.mode",
        "slat",
        pv.fsdp,
        "`full_shard` as `zero3`, `shard_grad_op` as `zero2`; `offload`",
    ),
    "fsdp_config": Alias(
        "parallel.mode", "slatc", pv.fsdp_config, "`zero3`, `zero2`, shards with replicas, offload"
    ),
    "fsdp_version": Alias(
        "parallel.mode", "a", pv.fsdp_version, "`zero3`, or as `fsdp_config` says"
    ),
    **{
        f"fsdp_{name}": Alias("parallel.mode", "atc", pv.fsdp_setting(name), "as in `fsdp_config`")
        for name in (
            "sharding_strategy",
            "reshard_after_forward",
            "offload_params",
            "activation_checkpointing",
        )
    },
    "distributed_type": Alias(
        "parallel.mode", "c", pv.distributed_type, "`MULTI_GPU` as `ddp`, `FSDP`, `DEEPSPEED`, `NO`"
    ),
    "dist_config": Alias(
        "parallel.mode", "l", pv.dist_config, "`{name: fsdp2}` as `zero3`, `{name: deepspeed}`"
    ),
    "ddp": Alias("parallel.mode", "a", pv.ddp, "true as `ddp`"),
    "parallelism_config": Alias("parallel.tensor", "tc", pv.parallelism_config, "the sizes in it"),
    "tp_config": Alias("parallel.tensor", "c", pv.tp_config, "`tp_size` in it"),
    "tensor_parallel_size": Alias("parallel.tensor", "as", pv.size("parallel.tensor")),
    "tensor_model_parallel_size": Alias("parallel.tensor", "sl", pv.size("parallel.tensor")),
    "pipeline_parallel_size": Alias("parallel.pipeline", "as", pv.size("parallel.pipeline")),
    "pipeline_model_parallel_size": Alias("parallel.pipeline", "sl", pv.size("parallel.pipeline")),
    "dp_shard_size": Alias("parallel.shard", "a", pv.size("parallel.shard")),
    "dp_replicate_size": Alias("parallel.data", "a", pv.size("parallel.data")),
    "sequence_parallel": Alias(
        "parallel.sequence_parallel", "sl", c.flag("parallel.sequence_parallel")
    ),
    # -- method
    "finetuning_type": Alias("lora.enable", "l", v.tuner, "`lora` or `full`"),
    "tuner_type": Alias("lora.enable", "s", v.tuner, "`lora` or `full`"),
    "train_type": Alias("lora.enable", "s", v.tuner, "`lora` or `full`"),
    "sft_type": Alias("lora.enable", "s", v.tuner, "`lora` or `full`"),
    "adapter": Alias("lora.enable", "a", v.adapter, "`lora` or `qlora`; a path as `lora.adapter`"),
    "use_peft": Alias("lora.enable", "t", c.flag("lora.enable")),
    "use_lora": Alias("lora.enable", "t", c.flag("lora.enable")),
    "lora_r": Alias("lora.rank", "at", c.to("lora.rank")),
    "lora_rank": Alias("lora.rank", "sl", c.to("lora.rank")),
    "lora_alpha": Alias("lora.alpha", "slat", c.to("lora.alpha")),
    "lora_dropout": Alias("lora.dropout", "slat", c.to("lora.dropout")),
    "lora_dropout_p": Alias("lora.dropout", "s", c.to("lora.dropout")),
    "lora_target": Alias("lora.target_modules", "l", lora.targets, _TARGETS),
    "lora_target_modules": Alias("lora.target_modules", "sat", lora.targets, _TARGETS),
    "target_modules": Alias("lora.target_modules", "st", lora.targets, _TARGETS),
    "lora_target_linear": Alias(
        "lora.target_modules", "a", lora.target_linear, "true as `all-linear`"
    ),
    "target_regex": Alias("lora.target_modules", "s", lora.target_regex, "before `target_modules`"),
    "lora_modules_to_save": Alias("lora.modules_to_save", "sat", c.listed("lora.modules_to_save")),
    "modules_to_save": Alias("lora.modules_to_save", "s", c.listed("lora.modules_to_save")),
    "additional_target": Alias("lora.modules_to_save", "l", c.listed("lora.modules_to_save")),
    "peft_config": Alias(
        "lora.enable", "l", v1.peft_config, "`{name: lora, r: ..., ...}` as the keys of `lora`"
    ),
    "lora_model_dir": Alias("lora.adapter", "a", v.adapter_path),
    "adapter_name_or_path": Alias("lora.adapter", "lt", v.adapter_path),
    "adapters": Alias("lora.adapter", "s", v.adapter_path),
    # -- precision and memory
    "bf16": Alias(
        f"{_T}precision", "", p.bf16, "true as `bf16-mixed`, `auto`, false alone as `32`"
    ),
    "fp16": Alias(
        f"{_T}precision", "", p.fp16, "true as `fp16-mixed`, `auto`; false alone sets nothing"
    ),
    "torch_dtype": Alias(f"{_T}precision", "slt", p.dtype, _DTYPE),
    "dtype": Alias(f"{_T}precision", "st", p.dtype, _DTYPE),
    "model_dtype": Alias(f"{_T}precision", "t", p.dtype, _DTYPE),
    "bfloat16": Alias(f"{_T}precision", "a", p.bf16, "as `bf16`"),
    "float16": Alias(f"{_T}precision", "a", p.fp16, "as `fp16`"),
    "pure_bf16": Alias(
        f"{_T}precision", "l", p.pure_bf16, "true as `bf16-mixed`: trained weights stay float32"
    ),
    "mixed_precision": Alias(f"{_T}precision", "c", p.mixed_precision, _MIXED),
    "activation_checkpointing": Alias(f"{_T}gradient_checkpointing", "t", v.checkpointing),
    "disable_gradient_checkpointing": Alias(
        f"{_T}gradient_checkpointing",
        "l",
        c.inverse(f"{_T}gradient_checkpointing", weak_when=False),
        "with the opposite sense",
    ),
    # -- batch, length, steps
    "micro_batch_size": Alias(
        f"{_T}per_device_train_batch_size", "a", c.to(f"{_T}per_device_train_batch_size")
    ),
    "eval_batch_size": Alias(
        f"{_T}per_device_eval_batch_size", "as", c.to(f"{_T}per_device_eval_batch_size")
    ),
    "cutoff_len": Alias(f"{_T}max_length", "l", c.to(f"{_T}max_length")),
    "max_seq_length": Alias(f"{_T}max_length", "t", c.to(f"{_T}max_length")),
    "max_seq_len": Alias(f"{_T}max_length", "t", c.to(f"{_T}max_length")),
    "sequence_len": Alias(f"{_T}max_length", "a", c.to(f"{_T}max_length")),
    "model_max_length": Alias(f"{_T}max_length", "t", c.to(f"{_T}max_length")),
    "truncation_strategy": Alias(
        f"{_T}overlong", "s", v.overlong, "`delete` as `drop`; cutting as `truncate`"
    ),
    "truncation_mode": Alias(f"{_T}overlong", "t", v.overlong, "`truncate`"),
    "excess_length_strategy": Alias(f"{_T}overlong", "a", v.overlong, "`drop` or `truncate`"),
    "sample_packing": Alias(
        f"{_T}packing", "a", v.packing, "the batch size goes on counting samples"
    ),
    "neat_packing": Alias(
        f"{_T}packing", "l", v.neat_packing, "the batch size goes on counting samples"
    ),
    "padding_free": Alias(f"{_T}packing", "st", v.padding_free),
    "batch_flattening": Alias(f"{_T}packing", "a", v.padding_free),
    "num_epochs": Alias(f"{_T}num_train_epochs", "a", c.to(f"{_T}num_train_epochs")),
    "max_epochs": Alias(f"{_T}num_train_epochs", "s", c.to(f"{_T}num_train_epochs")),
    "save_strategy": Alias(
        f"{_T}save_steps", "slat", v.save_strategy, "`no` as 0; `epoch` as a share of all steps"
    ),
    "eval_strategy": Alias(
        f"{_T}eval_steps", "slat", v.eval_strategy, "`epoch` as 0; `no` is named as ignored"
    ),
    "evaluation_strategy": Alias(
        f"{_T}eval_steps", "slat", v.eval_strategy, "`epoch` as 0; `no` is named as ignored"
    ),
    "saves_per_epoch": Alias(
        f"{_T}save_steps", "a", v.per_epoch("_saves_per_epoch"), "as a share of all steps"
    ),
    "evals_per_epoch": Alias(
        f"{_T}eval_steps", "a", v.per_epoch("_evals_per_epoch"), "as a share of all steps"
    ),
    # -- order of the samples
    "train_dataloader_shuffle": Alias(f"{_T}shuffle", "s", c.flag(f"{_T}shuffle")),
    "dataset_shuffle": Alias(
        f"{_T}shuffle", "s", v.shuffle, "gives way to `train_dataloader_shuffle`"
    ),
    "shuffle_merged_datasets": Alias(f"{_T}shuffle", "a", v.shuffle),
    "shuffle_dataset": Alias(f"{_T}shuffle", "t", v.shuffle),
    "disable_shuffling": Alias(
        f"{_T}shuffle", "l", c.inverse(f"{_T}shuffle", weak_when=False), "with the opposite sense"
    ),
    "curriculum_sampling": Alias(
        f"{_T}shuffle", "a", c.inverse(f"{_T}shuffle", weak_when=False), "with the opposite sense"
    ),
    "train_sampling_strategy": Alias(f"{_T}shuffle", "t", v.sampling, "`sequential` as false"),
    # -- optimizer
    "lr": Alias(f"{_T}learning_rate", "t", c.to(f"{_T}learning_rate")),
    "lr_scheduler": Alias(f"{_T}lr_scheduler_type", "a", v.scheduler),
    "optimizer": Alias(
        f"{_T}optim", "a", v.optim, "each AdamW as `adamw`; 8-bit states are float32 here"
    ),
    "sgd_momentum": Alias(f"{_T}momentum", "t", c.to(f"{_T}momentum")),
    "gradient_clipping": Alias(f"{_T}max_grad_norm", "t", c.to(f"{_T}max_grad_norm")),
    # -- loss
    "train_on_prompt": Alias(f"{_T}train_on_inputs", "l", c.flag(f"{_T}train_on_inputs")),
    "completion_only_loss": Alias(
        f"{_T}train_on_inputs", "t", c.inverse(f"{_T}train_on_inputs"), "with the opposite sense"
    ),
    "assistant_only_loss": Alias(
        f"{_T}train_on_inputs",
        "t",
        c.inverse(f"{_T}train_on_inputs", weak_when=False),
        "with the opposite sense",
    ),
    "loss_scale": Alias(
        f"{_T}train_on_inputs",
        "s",
        v.loss_scale,
        "`all` as true, `default` as false, `last_round` as `train_on_turns: last`; others are"
        " refused",
    ),
    "mask_history": Alias(
        f"{_T}train_on_turns", "l", v.mask_history, "true as `last`, false as `all`"
    ),
    "roles_to_train": Alias(
        "", "a", v.roles_to_train, "the names of the assistant; others are refused"
    ),
    "train_on_eos": Alias("", "a", v.train_on_eos, "`turn`; others are refused"),
    "train_on_eot": Alias("", "a", v.train_on_eos, "`turn`; others are refused"),
    "loss_type": Alias(
        "",
        "st",
        v.supervised_loss,
        "`nll` as it is here; `dft` is not available; other losses are refused",
    ),
    **{
        key: Alias("", tools, v.attention, "`sdpa` as it is here; other kernels are not available")
        for key, tools in {
            "flash_attn": "l",
            "attn_impl": "s",
            "attn_implementation": "at",
            "attention": "a",
            "sdp_attention": "a",
        }.items()
    },
    "tuner_backend": Alias("", "s", v.tuner_backend, "`peft` as it is here"),
    # -- set nothing; what is said depends on the value
    "model_class": Alias("", "l", v1.model_class, "`llm`; others are refused"),
    **{
        key: Alias("", tools, pv.context(), "1; context parallelism is refused")
        for key, tools in {
            "context_parallel_size": "as",
            "context_parallel_degree": "a",
            "cp_size": "l",
            "sequence_parallel_size": "sl",
            "sequence_parallel_degree": "a",
            "ulysses_parallel_size": "s",
            "ring_attention_size": "s",
        }.items()
    },
    **{
        key: Alias("", tools, pv.context("expert parallelism"), "1; expert parallelism is refused")
        for key, tools in {
            "expert_parallel_size": "a",
            "expert_model_parallel_size": "sl",
            "ep_size": "l",
        }.items()
    },
    "deepspeed_autotp_size": Alias(
        "", "s", pv.autotp, "1; tensor parallelism inside DeepSpeed is refused"
    ),
    "zero_hpz_partition_size": Alias("", "s", pv.hpz, "1; ZeRO++ is refused"),
    "env": Alias(
        "", "t", v.variables, "named as ignored: environment variables are not set from a config"
    ),
    "ENV": Alias(
        "", "s", v.variables, "named as ignored: environment variables are not set from a config"
    ),
    "model_revision": Alias(
        "", "slt", v.revision, "`main`; for another download it and give the folder"
    ),
    "do_train": Alias("", "lt", v.trains, "true; the command trains"),
    "use_chat_template": Alias(
        "", "s", c.on_here(_CHAT), "true; for plain text use `task: pretrain`"
    ),
}

#: names that are only clear inside their section, such as those of peft's LoraConfig under `lora`
SECTION_ALIASES: dict[str, Alias] = {
    "lora.r": Alias("lora.rank", "t", c.to("lora.rank")),
    "lora.target": Alias("lora.target_modules", "l", lora.targets),
    "lora.enabled": Alias("lora.enable", "t", c.flag("lora.enable")),
}

#: Paceline's own keys whose name other tools share: values of theirs that ours does not take.
#: Always applied.
SHARED: dict[str, Alias] = {
    "parallel.mode": Alias("parallel.mode", "", pv.mode),
    "task": Alias(
        "task",
        "s",
        lambda value: (
            v.task(value) if str(value).lower() in _PREFERENCE else c.Conversion({"task": value})
        ),
    ),
    "split_dataset_ratio": Alias("split_dataset_ratio", "s", v.ratio),
    "report_to": Alias("report_to", "slt", v.report_to),
    "lora.target_modules": Alias("lora.target_modules", "sat", lora.targets),
    f"{_T}precision": Alias(f"{_T}precision", "", p.precision),
    f"{_T}gradient_checkpointing": Alias(f"{_T}gradient_checkpointing", "sat", v.checkpointing),
    f"{_T}optim": Alias(f"{_T}optim", "slt", v.optim),
    f"{_T}lr_scheduler_type": Alias(f"{_T}lr_scheduler_type", "slt", v.scheduler),
    f"{_T}lr_scheduler_kwargs": Alias(f"{_T}lr_scheduler_kwargs", "slt", v.scheduler_args),
    f"{_T}warmup_steps": Alias(f"{_T}warmup_steps", "t", v.warmup_steps),
}

#: the same, applied only in a config that has keys of other tools: a native one means what it says
SHARED_IF_FOREIGN: dict[str, Alias] = {
    "dataset": Alias("dataset", "sl", train_sources),
    "val_dataset": Alias("val_dataset", "s", eval_sources),
    "chat_template": Alias("chat_template", "at", v.chat_template),
    "lora.modules_to_save": Alias("lora.modules_to_save", "sat", c.listed("lora.modules_to_save")),
    f"{_T}packing": Alias(f"{_T}packing", "slt", v.packing),
}

"""Keys of ms-swift (s), LLaMA-Factory (l), axolotl (a) and TRL with transformers (t) that mean
nothing here, with the reason.

A key that changes what is learned, or how much memory is used, is a ``warning``; its reason says
what happens instead. ``info`` is for logging, caching, uploads and other keys without such an
effect.
"""

from __future__ import annotations

from paceline.config.compat.keys import Ignored

_GROUPS: list[tuple[str, str, dict[str, str]]] = [
    ("warning", "attention is torch's scaled-dot-product attention: the same result to rounding, other speed and memory", {
        "a": "flash_attention xformers_attention flex_attention eager_attention "
             "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum "
             "flex_attn_compile_kwargs",
        "s": "use_flash_attn",
        "t": "use_flash_attention_2",
    }),
    ("warning", "kernels that replace a model's own are not available: the same results to rounding, more memory and time", {
        "a": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel unsloth_cross_entropy_loss "
             "unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope use_kernels "
             "cut_cross_entropy chunked_cross_entropy tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp",
        "l": "use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_kt kt_optimize_rule cpu_infer "
             "chunk_size use_kernel kt_mode kt_use_kernel",
        "st": "use_liger_kernel",
        "t": "liger_kernel_config use_liger",
        "s": "use_tiled_mlp",
    }),
    ("warning", "torch.compile is not used: the same results to rounding, other speed and memory", {
        "c": "dynamo_config dynamo_backend",
        "at": "torch_compile torch_compile_backend torch_compile_mode",
    }),
    ("warning", "the matrix precision is torch's default", {
        "at": "tf32",
        "a": "float32",
    }),
    ("info", "it is how Paceline trains: nothing is cached for generation, and activations are recomputed without re-entry", {
        "t": "use_cache",
        "l": "use_reentrant_gc use_kv_cache",
    }),
    ("info", "activations are recomputed the way torch recommends (without re-entry)", {
        "sat": "gradient_checkpointing_kwargs",
        "t": "gradient_checkpointing_use_reentrant activation_checkpointing_kwargs",
        "s": "vit_gradient_checkpointing",
    }),
    ("info", "Paceline shards the model's blocks and writes `model/` in full", {
        "a": "fsdp_final_state_dict_type qlora_sharded_model_loading",
    }),
    ("info", "Paceline loads the data and accumulates gradients by itself", {
        "t": "accelerator_config",
    }),
    ("info", "it concerns context parallelism, which is not supported", {
        "a": "heads_k_stride ring_attn_func context_parallel_mode",
        "l": "cp_mode sequence_parallel_mode",
    }),
    ("info", "it concerns how LLaMA-Factory loads, speeds up or samples from a model", {
        "l": "kernel_config init_config sample_backend batching_workers enable_activation_cpu_offload",
    }),
    ("info", "Megatron-LM is not used; strategies are chosen with `parallel`", {
        "l": "use_mca",
        "c": "megatron_lm_config",
    }),
    ("info", "the number of ranks is `parallel.num_gpus` times `parallel.nnodes`", {
        "a": "world_size",
    }),
    ("info", "Paceline starts the ranks itself", {
        "c": "compute_environment rdzv_backend same_network main_training_function enable_cpu_affinity gpu_ids "
             "mpirun_config ipex_config command_file commands command tpu_name tpu_zone tpu_use_cluster tpu_use_sudo "
             "tpu_vm tpu_env downcast_bf16",
    }),
    ("warning", "8-bit training is not supported", {
        "c": "fp8_config",
    }),
    ("info",
     "the process group is Paceline's own: tokenising is done before it exists and its time limit is "
     "`parallel.timeout_s`", {
        "slat": "ddp_timeout",
        "st": "ddp_backend",
        "sat": "ddp_find_unused_parameters ddp_broadcast_buffers",
        "t": "ddp_static_graph local_rank ddp_port",
        "c": "main_process_port",
        "s": "MASTER_PORT master_port",
    }),
    ("info", "Paceline starts the workers itself; `paceline ray` trains on a Ray cluster", {
        "la": "ray_run_name ray_storage_path ray_num_workers placement_strategy resources_per_worker "
              "ray_init_kwargs",
        "as": "use_ray",
        "s": "ray_exp_name device_groups",
    }),
    ("info", "the run is followed with report.html, events.jsonl, `paceline watch` and TensorBoard", {
        "t": "run_name project logging_nan_inf_filter log_level log_level_replica log_on_each_node "
             "include_num_input_tokens_seen include_for_metrics skip_memory_metrics disable_tqdm trackio_space_id "
             "trackio_bucket_id trackio_static_space_id logging_strategy include_tokens_per_second",
        "l": "plot_loss use_swanlab print_param_status include_effective_tokens_per_second compute_accuracy",
        "st": "logging_first_step logging_dir",
        "s": "log_interval create_checkpoint_symlink add_version swanlab_token swanlab_exp_name "
             "enable_channel_loss",
        "a": "profiler_steps profiler_steps_start eval_table_size eval_max_new_tokens do_causal_lm_eval "
             "eval_causal_lm_metrics do_bench_eval bench_dataset bench_split use_wandb use_mlflow use_comet "
             "use_otel_metrics debug test_value gc_steps "
             "hf_mlflow_log_artifacts mlflow_run_name",
    }),
    ("info", "nothing is uploaded; `model/` in output_dir is what to upload", {
        "st": "push_to_hub hub_model_id hub_private_repo hub_strategy hub_token hub_always_push",
        "at": "hub_revision",
        "a": "push_dataset_to_hub hf_use_auth_token",
        "l": "hf_hub_token ms_hub_token om_hub_token export_dir export_size export_device export_legacy_format "
             "export_hub_model_id",
        "s": "push_to_hub_async",
    }),
    ("info", "a checkpoint always holds all that resuming needs, in safetensors", {
        "slat": "save_only_model",
        "at": "save_safetensors save_first_step",
        "t": "save_on_each_node restore_callback_states_from_checkpoint enable_jit_checkpoint",
        "s": "save_last",
        "a": "merge_lora merge_method",
    }),
    ("info", "the same command resumes the run; `resume: never` starts a new one", {
        "lt": "overwrite_output_dir",
        "l": "load_args",
    }),
    ("info", "tokenised data is cached by content, so it is never stale", {
        "l": "overwrite_cache preprocessing_batch_size data_shared_file_system",
        "lt": "preprocessing_num_workers",
        "st": "dataset_num_proc",
        "a": "dataset_prepared_path dataset_processes dataset_keep_in_memory "
             "is_preprocess preprocess_iterable",
        "s": "load_from_cache_file download_mode lazy_tokenize preprocess_num_proc load_data_args",
        "t": "dataset_batch_size",
        "slt": "cache_dir",
    }),
    ("warning", "the data is read and tokenized as a whole before training, not streamed: it takes more disk", {
        "slt": "streaming",
        "l": "buffer_size",
        "s": "shuffle_buffer_size stopping_strategy",
        "t": "dataset_streaming",
        "a": "pretrain_multipack_buffer_size streaming_multipack_buffer_size shuffle_before_merging_datasets",
    }),
    ("info", "classes are found from the model's own config", {
        "a": "tokenizer_type tokenizer_use_fast "
             "tokenizer_save_jinja_files processor_type "
             "base_model_ignore_patterns is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
             "is_qwen_derived_model low_cpu_mem_usage",
        "sa": "model_type",
        "l": "use_fast_tokenizer infer_dtype infer_backend offload_folder adapter_folder",
        "s": "load_from_config "
             "local_repo_path ignore_args_error",
    }),
    ("warning", "a revision cannot be named; download it and give the folder", {
        "a": "revision_of_model",
        "t": "base_model_revision model_code_revision revision",
    }),
    ("info", "padding is to the longest sample of a micro-batch, or none with packing: the results are the same", {
        "a": "multipack_real_batches "
             "sample_packing_eff_est sample_packing_mp_start_method pad_token_id",
        "t": "pad_token padding_value",
        "s": "padding_side",
        "l": "ignore_pad_token_for_loss",
        "st": "packing_num_proc",
    }),
    ("warning", "`train_args.packing` puts the samples of a micro-batch in one row; other ways of packing are not supported", {
        "a": "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially pretrain_multipack_attn "
             "eval_sample_packing pretraining_sample_concatenation",
        "t": "eval_packing",
        "st": "packing_strategy",
        "s": "packing_length",
    }),
    ("info",
     "loaders are set with `dataloader_num_workers`, `dataloader_prefetch_factor` and "
     "`dataloader_pin_memory`", {
        "st": "dataloader_persistent_workers",
        "t": "dataloader_in_order dataloader_multiprocessing_context label_names length_column_name",
    }),
    ("warning", "every sample is seen once an epoch: nothing is left out at its end", {
        "sat": "dataloader_drop_last",
    }),
    ("info", "the order of samples and the weights' start come from one `seed`", {
        "t": "full_determinism",
    }),
    ("warning", "the order of samples is a shuffle fixed by the seed", {
        "sat": "group_by_length",
    }),
    ("info", "evaluation runs every `eval_steps`, or at the end of each epoch; its loss is exact over all rows", {
        "t": "eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object "
             "batch_eval_metrics prediction_loss_only",
        "lt": "do_eval",
        "s": "val_dataset_shuffle acc_strategy acc_steps eval_use_evalscope eval_limit "
             "eval_generation_config",
        "l": "eval_on_each_dataset eval_num_beams",
        "st": "predict_with_generate",
    }),
    ("warning", "`save_total_limit` limits the number of checkpoints that are kept", {
        "a": "save_total_per_epoch",
    }),
    ("warning", "training runs to its end and `model/` is the last state", {
        "slat": "load_best_model_at_end",
        "a": "early_stopping_patience",
        "l": "early_stopping_steps",
        "s": "early_stop_interval",
    }),
    ("info", "there is one metric of evaluation, the loss", {
        "slat": "metric_for_best_model greater_is_better",
    }),
    ("warning", "this command trains; for answers use `paceline generate`", {
        "lt": "do_predict",
    }),
    ("warning", "4-bit and 8-bit loading are not there: the weights are loaded in full, which takes more memory", {
        "at": "load_in_4bit load_in_8bit",
        "l": "quantization_bit quant_config",
        "s": "quant_bits",
        "a": "gptq",
    }),
    ("info", "it concerns quantized loading, which is not available", {
        "l": "quantization_device_map "
             "export_quantization_bit export_quantization_dataset export_quantization_nsamples "
             "export_quantization_maxlen",
    }),
    ("warning", "8-bit and 4-bit training are not there", {
        "la": "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
        "a": "qat quantization nvfp4_training",
    }),
    ("warning", "this kind of adapter is not there; plain LoRA is trained", {
        "slt": "use_dora use_rslora",
        "a": "peft_use_dora peft_use_rslora peft peft_init_lora_weights relora relora_steps relora_prune_ratio "
             "relora_prune_method relora_cpu_offload loraplus_lr_ratio loraplus_lr_embedding "
             "lora_target_parameters peft_layers_to_transform peft_layers_pattern peft_layer_replication "
             "peft_trainable_token_indices lora_fan_in_fan_out",
        "l": "pissa_init pissa_iter pissa_convert create_new_adapter oft_rank oft_block_size oft_target "
             "module_dropout",
        "s": "lorap_lr_ratio lora_plus_lr_ratio init_weights target_parameters lora_bias lora_dtype "
             "use_swift_lora",
        "t": "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern",
    }),
    ("info", "adapters are loaded and saved as peft does", {
        "t": "lora_task_type inference_mode fan_in_fan_out",
    }),
    ("warning", "no layers are frozen or left out: `lora.enable: false` trains all weights", {
        "l": "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro",
        "s": "freeze_parameters freeze_parameters_ratio freeze_parameters_regex trainable_parameters "
             "trainable_parameters_regex",
        "a": "unfrozen_parameters",
        "sl": "freeze_llm "
              "freeze_language_model",
    }),
    ("warning", "the loss is the cross-entropy of each answer's tokens, as it stands", {
        "slat": "neftune_noise_alpha label_smoothing_factor",
        "l": "use_dft_loss use_eaft_loss use_asft_loss moe_aux_loss_coef",
        "s": "enable_dft_loss router_aux_loss_coef",
        "t": "use_weighted_loss",
        "a": "noisy_embedding_alpha",
    }),
    ("info",
     "the loss is normalised by the number of label tokens of the global batch, over ranks and "
     "accumulation", {
        "st": "average_tokens_across_devices",
    }),
    ("warning", "the optimizers are those of `train_args.optim`, with one learning rate for all weights", {
        "at": "optim_args optim_target_modules",
        "a": "embedding_lr embedding_lr_scale lr_groups torchdistx_path adam_epsilon2 adam_beta3",
        "l": "use_adam_mini use_muon use_galore use_badam use_apollo",
        "s": "vit_lr aligner_lr optimizer_group lisa_activated_layers lisa_step_interval",
    }),
    ("warning",
     "the schedule is that of `lr_scheduler_type`, without this setting; for a floor give `cosine_with_min_lr` and "
     "`lr_scheduler_kwargs: {min_lr_rate: ...}`", {
        "a": "cosine_min_lr_ratio cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor",
    }),
    ("warning",
     "give `per_device_train_batch_size` and `gradient_accumulation_steps`; their product with the ranks "
     "is the global batch", {
        "as": "batch_size",
        "t": "auto_find_batch_size split_batches",
        "s": "global_batch_size",
        "a": "total_batch_size",
    }),
    ("warning", "each sample is seen once an epoch, whatever its source", {
        "l": "mix_strategy interleave_probs",
        "s": "interleave_prob",
        "t": "dataset_weights dataset_mixer_eval",
    }),
    ("warning", "all rows that fit a format are kept, once each", {
        "a": "dataset_exact_deduplication min_sample_len drop_long_sequences",
        "sa": "strict",
    }),
    ("warning", "the tokenizer and the vocabulary are taken as they are", {
        "a": "special_tokens tokens added_tokens_overrides resize_token_embeddings_to_32x mean_resizing_embeddings "
             "shrink_embeddings embeddings_skip_upcast fix_untrained_tokens",
        "l": "resize_vocab split_special_tokens add_tokens add_special_tokens new_special_tokens_config "
             "init_special_tokens",
        "s": "new_special_tokens",
        "t": "eos_token",
    }),
    ("warning", "the model is built as its config says", {
        "sl": "rope_scaling",
        "l": "shift_attn mixture_of_depths upcast_layernorm upcast_lmhead_output train_from_scratch",
        "s": "max_model_len num_labels problem_type model_config_override",
        "a": "s2_attention use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks "
             "overrides_of_model_config overrides_of_model_kwargs llama4_linearized_experts plugins llmcompressor "
             "experts_implementation",
    }),
    ("info", "it concerns images, video or audio, which `task: sft` does not read", {
        "l": "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
             "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate media_dir",
        "s": "max_pixels norm_bbox",
        "a": "image_resize_algorithm",
    }),
    ("info", "it concerns writing text, not training", {
        "sl": "max_new_tokens temperature top_k top_p num_beams repetition_penalty",
        "s": "stream stop_words logprobs top_logprobs",
        "l": "do_sample length_penalty skip_special_tokens",
    }),
    ("warning", "torch manages the memory, and activations are not offloaded: it takes more memory", {
        "t": "torch_empty_cache_steps activation_offloading",
        "a": "gpu_memory_limit experimental_skip_move_to_device",
    }),
    ("info", "models and data come from the Hugging Face hub or a local folder", {"t": "use_auth_token token"}),
    ("warning", "it fills gaps in a dataset of ms-swift, which is read as it is", {"s": "model_author"}),
    ("warning", "the text that is trained on is that of the chat template, without further settings", {
        "s": "response_prefix agent_template template_backend",
        "l": "tool_format enable_thinking reasoning_effort",
        "a": "eot_tokens",
        "t": "chat_template_kwargs",
    }),
    ("warning", "the model is built as its own config says", {
        "t": "model_init_kwargs",
        "s": "model_kwargs init_strategy",
        "a": "base_model_config cls_model_config",
    }),
    ("warning", "the devices are those of `parallel`; a memory limit for each device is not supported", {
        "st": "max_memory",
    }),
    ("warning",
     "code and tables of the user are not loaded; give the files as `dataset`, and your code as `task: ./file.py:Class`", {
        "s": "external_plugins custom_register_path custom_dataset_info dataset_info register_path",
    }),
    ("warning", "the tokenizer is built as its own files say", {
        "a": "tokenizer_legacy tokenizer_use_mistral_common",
    }),
    ("warning", "padding is to the longest sample of a micro-batch, or none with packing: the same results, less memory", {
        "a": "pad_to_sequence_len pad_to_sequence_length",
        "t": "pad_to_multiple_of",
    }),
    ("warning", "the order of samples comes from `train_args.seed`", {
        "st": "data_seed",
    }),
    ("warning", "evaluation runs in the precision of training, over all rows of the validation data", {
        "t": "bf16_full_eval fp16_full_eval eval_accumulation_steps",
        "s": "val_dataset_sample",
    }),
    ("warning", "4-bit and 8-bit loading are not available: the weights are loaded in full, which takes more memory", {
        "l": "quantization_method quantization_type double_quantization",
        "s": "hqq_axis quant_method bnb_4bit_quant_storage",
        "st": "bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant",
        "t": "use_bnb_nested_quant",
        "a": "bnb_config_kwargs loftq model_quantization_config model_quantization_config_kwargs",
    }),
    ("warning", "adapters are loaded on the rank's device and trained in float32", {
        "a": "lora_on_cpu peft_autocast_adapter_dtype",
    }),
    ("warning", "training does not end by its loss; `recovery.rewind_on_spike` goes back before a jump of it", {
        "a": "loss_watchdog_threshold loss_watchdog_patience",
    }),
    ("warning", "all rows of each source are read and tokenized from the source itself", {
        "a": "dataset_shard_num dataset_shard_idx skip_prepare_dataset",
        "t": "dataset_kwargs",
        "s": "cached_dataset",
        "l": "tokenized_path",
    }),
    ("warning", "a run that resumes restores its whole state and its place in the data", {
        "s": "resume_only_model",
        "st": "ignore_data_skip",
    }),
    ("info", "only the columns of the format are read", {"sat": "remove_unused_columns"}),
    ("info", "it concerns the image and audio parts of a model, which `task: sft` does not train", {
        "sl": "freeze_vit freeze_aligner freeze_vision_tower freeze_multi_modal_projector",
    }),
]  # fmt: skip

IGNORED: dict[str, Ignored] = {
    key: Ignored(tools, level, reason)
    for level, reason, by_tools in _GROUPS
    for tools, keys in by_tools.items()
    for key in keys.split()
}

_TRACKERS = "the run is followed with report.html, events.jsonl, `paceline watch` and TensorBoard"
_KERNELS = (
    "kernels that replace a model's own are not available: the same results to rounding, more"
    " memory and time"
)
_OPTIMIZERS = (
    "the optimizers are those of `train_args.optim`, with one learning rate for all weights"
)
#: beginnings of keys: whole families of settings of one feature
IGNORED_PREFIXES: dict[str, Ignored] = {
    "wandb_": Ignored("a", "info", _TRACKERS),
    "comet_": Ignored("a", "info", _TRACKERS),
    "mlflow_": Ignored("a", "info", _TRACKERS),
    "swanlab_": Ignored("sl", "info", _TRACKERS),
    "otel_": Ignored("a", "info", _TRACKERS),
    "gradio_": Ignored("a", "info", "it concerns writing text, not training"),
    "vllm_": Ignored("st", "info", "it concerns writing text, not training"),
    "liger_": Ignored("a", "warning", _KERNELS),
    "galore_": Ignored("sl", "warning", _OPTIMIZERS),
    "badam_": Ignored("l", "warning", _OPTIMIZERS),
    "apollo_": Ignored("l", "warning", _OPTIMIZERS),
    "lisa_": Ignored("sa", "warning", _OPTIMIZERS),
    "fsdp_": Ignored(
        "at", "info", "Paceline shards the model's blocks and saves checkpoints by itself"
    ),
    "lora_ga_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "adalora_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "vera_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "boft_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "reft_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "fourier_": Ignored("s", "warning", "this kind of adapter is not there; plain LoRA is trained"),
    "llamapro_": Ignored(
        "s", "warning", "this kind of adapter is not there; plain LoRA is trained"
    ),
}

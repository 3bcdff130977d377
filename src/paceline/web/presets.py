"""The configs of common jobs, and the models and datasets that the form proposes."""

#: Built-in datasets, and the task that each is for.
BUILT_IN_DATASETS = {
    "builtin:small-questions": "sft",
    "builtin:small-questions-held-out": "sft",
    "builtin:python-docs": "sft",
    "builtin:python-source": "pretrain",
    "builtin:digits": "classify",
    "builtin:python-kinds": "classify",
    "builtin:clicks": "recommend",
}
#: Built-in models, and the task that each is for.
BUILT_IN_MODELS = {
    "builtin:qwen2-tiny": "sft",
    "builtin:qwen2-micro": "sft",
    "builtin:small-cnn": "classify",
    "builtin:mlp": "classify",
    "builtin:dlrm": "recommend",
}
#: Common models of the hub, and their number of parameters.
HUB_MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134515008,
    "Qwen/Qwen2.5-0.5B-Instruct": 494032768,
    "Qwen/Qwen3-0.6B": 596049920,
    "meta-llama/Llama-3.2-1B-Instruct": 1235814400,
    "Qwen/Qwen2.5-1.5B-Instruct": 1543714304,
    "Qwen/Qwen3-1.7B": 1720574976,
    "google/gemma-2-2b-it": 2614341888,
    "Qwen/Qwen3-4B": 4022468096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7248023552,
    "Qwen/Qwen2.5-7B-Instruct": 7615616512,
    "meta-llama/Llama-3.1-8B-Instruct": 8030261248,
    "Qwen/Qwen3-8B": 8190735360,
}

#: The config of each common job.
PRESETS = {
    "first": """\
# A first run: a small model with random weights learns to answer sums of two-digit
# numbers, times of day and metric units. Nothing is downloaded.
model: builtin:qwen2-micro
dataset: builtin:small-questions
val_dataset: builtin:small-questions-held-out
train_args:
  max_length: 64
  per_device_train_batch_size: 64
  max_steps: 900
  learning_rate: 3e-3
  adam_beta2: 0.98
  warmup_ratio: 0.05
  eval_steps: 300
  save_steps: 300
evaluation:
  metrics: [exact_match]
  metric_rows: null
  max_new_tokens: 8
""",
    "lora": """\
# Fine-tune a pretrained model on your examples with low-rank adapters:
# needs little memory and gives a small result.
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: ./datasets/mine.jsonl
split_dataset_ratio: 0.05
lora:
  enable: true
  rank: 16
  alpha: 32
train_args:
  learning_rate: 1e-4
  num_train_epochs: 3
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 4
  warmup_ratio: 0.05
""",
    "full": """\
# Fine-tune all weights of a pretrained model on your examples.
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: ./datasets/mine.jsonl
split_dataset_ratio: 0.05
train_args:
  learning_rate: 2e-5
  num_train_epochs: 3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 8
  warmup_ratio: 0.05
  gradient_checkpointing: full
""",
    "pretrain": """\
# Train on plain text with loss on every token: a new model, or a pretrained one that
# has to learn a language or a domain.
model: builtin:qwen2-tiny
task: pretrain
dataset: builtin:python-source
split_dataset_ratio: 0.02
train_args:
  learning_rate: 1e-3
  num_train_epochs: 1
  per_device_train_batch_size: 8
  max_length: 512
  warmup_ratio: 0.05
""",
    "dpo": """\
# Teach a model which of two answers people prefer (DPO). The file has the columns
# `prompt`, `chosen` and `rejected` (docs/how-to/preference.md).
model: Qwen/Qwen2.5-0.5B-Instruct
task: dpo
dataset: ./datasets/pairs.jsonl
split_dataset_ratio: 0.05
lora:
  enable: true
preference:
  beta: 0.1
train_args:
  learning_rate: 1e-5
  num_train_epochs: 1
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 4
  warmup_ratio: 0.1
""",
    "kto": """\
# Learn from single answers that are marked as good or bad (KTO). The file has the
# columns `prompt`, `completion` and `label` (docs/how-to/preference.md).
model: Qwen/Qwen2.5-0.5B-Instruct
task: kto
dataset: ./datasets/marked.jsonl
split_dataset_ratio: 0.05
lora:
  enable: true
preference:
  beta: 0.1
train_args:
  learning_rate: 1e-5
  num_train_epochs: 1
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 2
  warmup_ratio: 0.1
""",
    "reward": """\
# Train a model that scores answers. The file has the columns `prompt`, `chosen` and
# `rejected` (docs/how-to/preference.md).
model: Qwen/Qwen2.5-0.5B-Instruct
task: reward
dataset: ./datasets/pairs.jsonl
split_dataset_ratio: 0.05
train_args:
  learning_rate: 1e-5
  num_train_epochs: 1
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 4
  warmup_ratio: 0.1
""",
    "vision": """\
# Fine-tune a vision-language model on chats with images. The file has the columns
# `messages` and `images` (docs/how-to/vision-language.md). The model's processor needs
# torchvision: pip install 'paceline[vision]'
model: HuggingFaceTB/SmolVLM-500M-Instruct
dataset: ./datasets/chats-with-images.jsonl
split_dataset_ratio: 0.05
lora:
  enable: true
train_args:
  learning_rate: 1e-4
  num_train_epochs: 1
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 4
  max_length: 2048
  warmup_ratio: 0.05
""",
    "classify_text": """\
# Classify texts: which kind of object does a description from Python's documentation
# belong to? For your own texts, use a file with the columns `text` and `label`.
model: builtin:qwen2-micro
task: classify
dataset: builtin:python-kinds
split_dataset_ratio: 0.1
train_args:
  learning_rate: 2e-3
  num_train_epochs: 2
  per_device_train_batch_size: 32
  max_length: 128
  warmup_ratio: 0.1
""",
    "classify": """\
# Classify images. For your own images, use a folder with one subfolder per class.
model: builtin:small-cnn
task: classify
dataset: builtin:digits
split_dataset_ratio: 0.1
train_args:
  learning_rate: 3e-3
  num_train_epochs: 8
  per_device_train_batch_size: 32
  warmup_ratio: 0.1
""",
    "recommend": """\
# Predict clicks with embedding tables. For your own log, use a CSV file and name its
# columns in `recommend`.
model: builtin:dlrm
task: recommend
dataset: builtin:clicks
split_dataset_ratio: 0.1
recommend:
  embedding_dim: 8
train_args:
  learning_rate: 1e-2
  num_train_epochs: 2
  per_device_train_batch_size: 512
  warmup_ratio: 0.05
""",
    "own": """\
# Your own model, data and loss: a class in a Python file (docs/how-to/own-task.md).
model: my-model        # shown in the report
task: ./my_task.py:MyTask
dataset: my-data       # shown in the report if the task creates its own data
train_args:
  learning_rate: 1e-3
  num_train_epochs: 3
  per_device_train_batch_size: 32
""",
}

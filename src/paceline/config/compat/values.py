"""Values of other tools' keys, one function for each kind of value. Read beside
``aliases.yaml``."""

import json
import re
from typing import Any

from paceline.config.chat_roles import ROLES
from paceline.config.compat.conversion import (
    Conversion,
    Convert,
    UnsupportedValue,
    as_bool,
    info,
    is_off,
    warning,
    words,
)
from paceline.config.template_names import (
    FALLBACK,
    TEMPLATE_NAMES,
    TOKENIZER_DEFAULT,
    canonical_name,
    is_inline,
    is_path,
)

# -- the method

_QUANTISED = (
    "4-bit and 8-bit loading are not there: the weights are loaded in full, which takes more memory"
)


def tuner(value: Any) -> Conversion:
    """`lora`, `qlora`, `full`: how the weights are trained."""
    name = str(value).lower()
    if name == "lora":
        return Conversion({"lora.enable": True})
    if name == "qlora":
        return warning(_QUANTISED, lora__enable=True)
    if is_off(value) or name == "full":
        return Conversion({"lora.enable": False})
    raise UnsupportedValue(
        f"`{value}` is not a method that Paceline trains; it has `lora` and `full`",
        "use lora or full",
    )


def adapter(value: Any) -> Conversion:
    """axolotl's `adapter` names the method; a path is an adapter to go on from."""
    if isinstance(value, str) and (re.search(r"[/\\]", value) or value.startswith(".")):
        return adapter_path(value)
    return tuner(value)


def adapter_path(value: Any) -> Conversion:
    paths = words(value)
    if not paths:
        return Conversion()
    if len(paths) > 1:
        raise UnsupportedValue(
            f"{len(paths)} adapters are given; training goes on from one",
            "keep one of them, and merge the others before",
        )
    return Conversion({"lora.adapter": paths[0]}, weak={"lora.enable": True})


def task(value: Any) -> Conversion:
    """Stages and task types: supervised fine-tuning and pre-training are here, preference training
    is not."""
    name = str(value).lower()
    if name in ("sft", "instruct"):
        return Conversion({"task": "sft"})
    if name in ("pt", "pretrain", "pretraining", "cpt"):
        return Conversion({"task": "pretrain"})
    raise UnsupportedValue(
        f"`{value}` is not a task of Paceline; it has `sft`, `pretrain`, `classify` and your own"
        " (`./file.py:Class`)",
        "use sft, or the tool this config was written for",
    )


_PREFERENCE = (
    "dpo", "kto", "ppo", "grpo", "orpo", "rm", "rlhf", "gkd", "cpo", "simpo", "reward", "pt",
    "instruct",
)  # fmt: skip


def task_or_own(value: Any) -> Conversion:
    """Paceline's own `task`, whose values may be those of another tool."""
    return task(value) if str(value).lower() in _PREFERENCE else Conversion({"task": value})


def causal_only(value: Any) -> Conversion:
    if str(value).lower() in ("causal_lm", "tasktype.causal_lm"):
        return info("causal language models are what `task: sft` and `task: pretrain` train")
    raise UnsupportedValue(
        f"`{value}` is not a task of Paceline; it trains causal language models (`causal_lm`)",
        "use the tool this config was written for, or task: sft with a supervised dataset",
    )


_NEGATIVE_LOG_LIKELIHOOD = ("nll", "chunked_nll", "cross_entropy", "causal_lm", "forcausallm")


def supervised_loss(value: Any) -> Conversion:
    """TRL's and ms-swift's `loss_type`. The losses of preference training are recognized before, in
    ``methods``."""
    if is_off(value):
        return Conversion()
    name = str(value).lower()
    if name in _NEGATIVE_LOG_LIKELIHOOD:
        return info("the loss is the negative log-likelihood of the answers' tokens")
    if name == "dft":
        return warning(
            "dynamic fine-tuning is not available; the loss is the negative log-likelihood of the"
            " answers' tokens"
        )
    raise UnsupportedValue(
        f"`{value}` is not a loss that Paceline trains language models with; it has the negative"
        " log-likelihood (`nll`)",
        "remove the key to train with the negative log-likelihood, or use the tool this config was"
        " written for",
    )


def preference(value: Any) -> Conversion:
    return Conversion() if is_off(value) else task(value)


# -- precision and device


def quantised(value: Any) -> Conversion:
    return Conversion() if is_off(value) or as_bool(value) is False else warning(_QUANTISED)


_ATTENTION = "attention is torch's scaled-dot-product attention"


def attention(value: Any) -> Conversion:
    """The name of an attention kernel; `auto` and `disabled` (LLaMA-Factory) are torch's own."""
    name = str(value).lower()
    if is_off(value) or name in ("sdpa", "auto", "disabled", "true", "torch"):
        return info(_ATTENTION)
    return warning(f"{_ATTENTION}: the same result to rounding, other speed and memory")


def tuner_backend(value: Any) -> Conversion:
    if str(value).lower() == "peft":
        return info("adapters are those of peft")
    return warning(
        f"`{value}` is not available; adapters are those of peft: the same method, other speed and"
        " memory"
    )


def cpu(value: Any) -> Conversion:
    return Conversion({"parallel.device": "cpu"}) if as_bool(value) is True else Conversion()


def device_map(value: Any) -> Conversion:
    if value == "cpu":
        return Conversion({"parallel.device": "cpu"})
    return info("`parallel.mode` decides which rank holds which part of the model")


def ranks(value: Any) -> Conversion:
    return Conversion({"parallel.num_gpus": "auto" if value in ("gpu", "auto", -1) else value})


# -- the training

_SAME_OPTIM = {"adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor"}
_EIGHT_BIT = re.compile(
    r"^(paged_)?(adamw?|rmsprop|adagrad|sgd)(_bnb|_torch)?_[48]bit$|^rmsprop_bnb\w*$"
)


def optim(value: Any) -> Conversion:
    name = str(value).lower()
    if name in _SAME_OPTIM:
        return Conversion({"train_args.optim": name})
    if _EIGHT_BIT.match(name):
        kind = next((one for one in ("rmsprop", "adagrad", "sgd") if one in name), "adamw")
        return warning(
            "the optimizer's states are float32 here, not 8-bit: more memory, the same rule",
            train_args__optim=kind,
        )
    if re.match(r"^(paged_)?adamw(_\w+)?$", name) and not name.endswith(
        ("schedule_free", "galore", "stable")
    ):
        return Conversion({"train_args.optim": "adamw"})
    return Conversion({"train_args.optim": value})  # unknown: the schema says what there is


_SCHEDULES = {
    "cosine_warmup_with_min_lr": "cosine_with_min_lr",
    "cosine_annealing": "cosine",
    "wsd": "warmup_stable_decay",
    "constant_schedule": "constant",
    "constant_lr": "constant",
}


def scheduler(value: Any) -> Conversion:
    name = value.lower() if isinstance(value, str) else value
    return Conversion(
        {
            "train_args.lr_scheduler_type": (
                _SCHEDULES.get(name, name) if isinstance(name, str) else value
            )
        }
    )


def scheduler_args(value: Any) -> Conversion:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UnsupportedValue(
                f"`{value}` is not a mapping", "write it as {min_lr: 1e-6}"
            ) from None
    return Conversion({"train_args.lr_scheduler_kwargs": value})


def warmup_steps(value: Any) -> Conversion:
    if isinstance(value, float) and 0 < value < 1:
        return info("below 1 it is a share of the steps", train_args__warmup_ratio=value)
    return Conversion({"train_args.warmup_steps": value})


def ratio(value: Any) -> Conversion:
    """A share of the rows below 1, a number of rows from 1 on."""
    is_count = isinstance(value, float) and value >= 1 and value == int(value)
    return Conversion({"split_dataset_ratio": int(value) if is_count else value})


def per_epoch(target: str) -> Convert:
    """axolotl's `saves_per_epoch` and `evals_per_epoch`; settled against the number of epochs."""

    def convert(value: Any) -> Conversion:
        if is_off(value):
            return Conversion()
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedValue(
                f"`{value}` is not a number per epoch", "write a number of at least 1"
            )
        return Conversion({target: value})

    return convert


def checkpointing(value: Any) -> Conversion:
    if isinstance(value, str) and value.lower() in ("unsloth", "offload", "offload_disk"):
        return info(
            "activations are recomputed by torch, not offloaded",
            train_args__gradient_checkpointing=True,
        )
    return Conversion({"train_args.gradient_checkpointing": as_bool(value)})


_BATCH_NOTE = (
    "packing here puts a micro-batch's samples in one row; the batch size goes on counting samples,"
    " not packed rows"
)


def packing(value: Any) -> Conversion:
    return (
        warning(_BATCH_NOTE, train_args__packing=True)
        if as_bool(value) is True
        else Conversion({"train_args.packing": as_bool(value)})
    )


def padding_free(value: Any) -> Conversion:
    return (
        Conversion({"train_args.packing": True})
        if value == "auto" or as_bool(value) is True
        else Conversion()
    )


def neat_packing(value: Any) -> Conversion:
    return (
        warning(_BATCH_NOTE, train_args__packing=True) if as_bool(value) is True else Conversion()
    )


def overlong(value: Any) -> Conversion:
    name = str(value).lower()
    if name in ("delete", "drop"):
        return Conversion({"train_args.overlong": "drop"})
    if name in ("right", "truncate", "truncation_right", "keep_start", "true"):
        return Conversion({"train_args.overlong": "truncate"})
    if name in ("left", "truncation_left", "keep_end", "split"):
        return warning("too long a sample is cut at its end here", train_args__overlong="truncate")
    raise UnsupportedValue(
        f"`{value}` is not a way to treat samples that are too long",
        "use overlong: truncate or overlong: drop",
    )


def loss_scale(value: Any) -> Conversion:
    name = str(value).lower()
    if name == "default" or is_off(value):
        return Conversion(weak={"train_args.train_on_inputs": False})
    if name == "all":
        return Conversion({"train_args.train_on_inputs": True})
    if name == "last_round":
        return Conversion({"train_args.train_on_turns": "last"})
    raise UnsupportedValue(
        f"`{value}` weighs the tokens of an answer, which Paceline does not do",
        "use default, all or last_round",
    )


def mask_history(value: Any) -> Conversion:
    if as_bool(value) is True:
        return Conversion({"train_args.train_on_turns": "last"})
    return Conversion(weak={"train_args.train_on_turns": "all"})


def roles_to_train(value: Any) -> Conversion:
    """axolotl's list of roles whose turns carry the loss; here it is the assistant, under any of
    its names."""
    names = [name.lower() for name in words(value or [])]
    if names and all(ROLES.get(name) == "assistant" for name in names):
        return Conversion()
    if value is None:
        return Conversion()
    raise UnsupportedValue(
        "the loss is on the turns of the assistant, not on those of"
        f" {', '.join(names) or 'no role at all'}",
        "use roles_to_train: [assistant], or train_on_inputs: true for a loss on every token",
    )


def train_on_eos(value: Any) -> Conversion:
    """axolotl's choice of end-of-turn tokens that carry the loss."""
    if value is None or str(value).lower() == "turn":
        return Conversion()
    raise UnsupportedValue(
        f"`{value}`: the end-of-turn token carries the loss after each turn that does, and after no"
        " other",
        "use turn",
    )


def save_strategy(value: Any) -> Conversion:
    return Conversion({"_save_strategy": "no" if is_off(value) else str(value).lower()})


def eval_strategy(value: Any) -> Conversion:
    return Conversion({"_eval_strategy": "no" if is_off(value) else str(value).lower()})


def resume(value: Any) -> Conversion:
    value = as_bool(value)
    if isinstance(value, bool):
        return Conversion({"resume": "auto" if value else "never"})
    return Conversion({"resume": value})


def report_to(value: Any) -> Conversion:
    if is_off(value) or value == ["none"]:
        return Conversion({"report_to": []})
    names = [name.lower() for name in words(value)]
    if "all" in names:
        return info("of all the places, TensorBoard is there", report_to=["tensorboard"])
    kept = [name for name in names if name == "tensorboard"]
    lost = [name for name in names if name not in ("tensorboard", "none")]
    if not lost:
        return Conversion({"report_to": kept})
    return warning(
        f"{', '.join(lost)} cannot be reported to; report.html, events.jsonl and TensorBoard are"
        " there",
        report_to=kept,
    )


def tensorboard(value: Any) -> Conversion:
    return Conversion({"report_to": ["tensorboard"]}) if as_bool(value) is True else Conversion()


def trains(value: Any) -> Conversion:
    return Conversion() if as_bool(value) is True else warning("this command trains")


def revision(value: Any) -> Conversion:
    if value in ("main", "master"):
        return Conversion()
    return warning("a revision cannot be named; download it and give the folder as `model`")


def chat_template(value: Any) -> Conversion:
    """A name, a file, or a template written out."""
    if is_off(value):
        return Conversion()
    text = str(value)
    if text.strip().lower() == "jinja":
        return Conversion({"_jinja": True})
    if is_inline(text) or is_path(text) or text == TOKENIZER_DEFAULT:
        return Conversion({"chat_template": text})
    prefix = FALLBACK if text.startswith(FALLBACK) else ""
    name = canonical_name(text.removeprefix(FALLBACK))
    if name is None:
        return warning(
            "there is no template of this name, so the tokenizer's own is used; named:"
            f" {', '.join(TEMPLATE_NAMES)}"
        )
    return Conversion({"chat_template": prefix + name})


def template_name(value: Any) -> Conversion:
    """LLaMA-Factory's and ms-swift's `template`, which gives way to `chat_template`."""
    out = chat_template(value)
    return Conversion(weak=out.sets, says=out.says)


def variables(value: Any) -> Conversion:
    names = ", ".join(value) if isinstance(value, dict) else str(value)
    return warning(
        f"environment variables ({names}) are not set from a config; set them in your shell"
    )


# -- the order of samples


def shuffle(value: Any) -> Conversion:
    """Read a switch that another tool applies before its loader, which may shuffle again: the
    loader's switch prevails."""
    return Conversion(weak={"train_args.shuffle": as_bool(value)})


def sampling(value: Any) -> Conversion:
    """Read transformers' name of a sampler."""
    name = str(value).lower()
    if name == "sequential":
        return Conversion({"train_args.shuffle": False})
    if name == "random" or is_off(value):
        return Conversion(weak={"train_args.shuffle": True})
    return warning(
        f"`{value}` is not supported: samples are shuffled, or kept in order with"
        " `train_args.shuffle: false`"
    )

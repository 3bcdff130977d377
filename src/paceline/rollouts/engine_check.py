"""Which engines can generate the completions of a run. Checked before any rank exists."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.config.schema import Config
from paceline.config.schema.grpo import Engine
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.models.builtin import config_numbers
from paceline.models.json_config import JsonObject
from paceline.models.transformers_compat import batching_obstacle

_LIMITS = ("importance_sampling_clip_max", "importance_sampling_clip_min")
#: The keys of the modes of vLLM.
_OF_SERVER = ("vllm_server_base_url", "vllm_server_timeout", "vllm_group_port")
_OF_RANK = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enable_sleep_mode")
#: What the tokens of the completions of an engine depend on.
_REPEATABILITY: dict[Engine, UserText] = {
    "generate": UserText(
        "their tokens do not depend on the number of ranks", code="tokens-of-generate"
    ),
    "continuous_batching": UserText(
        "their tokens depend on the number of ranks", code="tokens-of-continuous-batching"
    ),
    "vllm": UserText("their tokens depend on what else vLLM computes", code="tokens-of-vllm"),
}


def generates_completions(config: Config) -> bool:
    """Return whether a run generates anything: one that trains on recorded completions does so only
    for evaluations."""
    has_evaluation = config.val_dataset is not None or config.split_dataset_ratio > 0
    return config.grpo.replay is None or has_evaluation


def check_engine(config: Config) -> None:
    """Check that the engine of the config can generate with the model, if it has to.

    Raises:
        ConfigError: it cannot, or it is not installed.
    """
    engine = config.grpo.engine_used
    if not generates_completions(config):
        return
    if config.grpo.environment is not None and engine != "generate":
        raise _unsupported(config, "completions with an environment are generated turn by turn")
    if engine == "vllm":
        _check_vllm(config)
    elif engine == "continuous_batching":
        fields = config_numbers(config.model)
        reason = batching_obstacle(fields) if fields else None
        if reason is not None:
            raise _unsupported(config, reason)


def check_engine_of_model(config: Config, fields: JsonObject) -> None:
    """Check the engine with the config of a model that has been loaded, which
    :func:`check_engine` may not have found.

    Raises:
        ConfigError: the engine cannot generate with it.
    """
    if config.grpo.engine_used == "continuous_batching" and generates_completions(config):
        reason = batching_obstacle(fields)
        if reason is not None:
            raise _unsupported(config, reason)


def engine_notices(config: Config) -> list[Notice]:
    """Return what generates the completions and why, what is not tested or differs, and what has no
    effect."""
    generates = generates_completions(config)
    notices = _engine_notices(config) if generates else []
    unused = sorted(_without_effect(config))
    if unused:
        because = f"`grpo.engine: {config.grpo.engine_used}`" if generates else "`grpo.replay`"
        text = UserText(
            "{keys}: no effect with {because}",
            code="engine-without-effect",
            keys=", ".join(f"`grpo.{name}`" for name in unused),
            because=because,
        )
        notices.append(Notice("info", text))
    return notices


def _engine_notices(config: Config) -> list[Notice]:
    engine = config.grpo.engine_used
    notices = [
        Notice(
            "info",
            UserText(
                "completions: generated with `{engine}` ({reason})",
                code="rollout-engine",
                engine=engine,
                reason=_REPEATABILITY[engine],
            ),
        )
    ]
    if engine == "vllm":
        text = UserText(
            "`grpo.engine: vllm` is untested: Paceline has never run with vLLM. Compare"
            " `logprob_diff` of the first steps with a run with `generate`",
            code="vllm-untested",
        )
        notices.append(Notice("warning", text))
    if engine != "generate" and config.grpo.corrects_probabilities and _restricts(config):
        text = UserText(
            "`grpo.engine: {engine}` gives the probabilities among the tokens that `top_k` and"
            " `top_p` leave, so `logprob_diff` and `importance_ratio` also count the probability of"
            " the others",
            code="restricted-probabilities",
            engine=engine,
        )
        notices.append(Notice("warning", text))
    return notices


def _without_effect(config: Config) -> set[str]:
    """Return the keys about the engine that are set and that the run does not use."""
    settings = config.grpo
    is_server = settings.vllm_mode == "server"
    unused = set() if settings.corrects_probabilities else {"importance_sampling_mode", *_LIMITS}
    if settings.engine_used != "vllm" or not generates_completions(config):
        unused |= {"vllm_mode", *_OF_SERVER, *_OF_RANK}
    else:
        unused |= {*(_OF_RANK if is_server else _OF_SERVER)}
    return settings.model_fields_set & unused


def _restricts(config: Config) -> bool:
    return bool(config.grpo.top_k) or config.grpo.top_p < 1


def _check_vllm(config: Config) -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "`grpo.engine: vllm` needs vLLM, which is not installed",
            code="rollouts-need-vllm",
            fix="run `pip install vllm`, or leave `grpo.engine` out",
        )
    fields = config_numbers(config.model)
    for is_set, reason in (
        (config.parallel.device == "cpu", "vLLM needs GPUs, and `parallel.device` is `cpu`"),
        (config.lora.quantize != "none", "vLLM gets merged weights, and `lora.quantize:"
         f" {config.lora.quantize}` has none"),
        ("quantization_config" in fields, "the files of the model are quantized, and its weights"
         " in training are not"),
        (bool(config.new_special_tokens), "vLLM loads a model without `new_special_tokens`"),
    ):  # fmt: skip
        if is_set:
            raise _unsupported(config, reason)


def _unsupported(config: Config, reason: str) -> ConfigError:
    return ConfigError(
        "`grpo.engine: {engine}` cannot generate the completions: {reason}",
        code="engine-not-supported",
        fix="leave `grpo.engine` out",
        engine=config.grpo.engine,
        reason=reason,
    )

"""Typed access to the config of a transformers model."""

from __future__ import annotations

import json

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.models.hub_configs import read_raw_config


class ModelConfig:
    """The values of the config of a language model.

    Args:
        values: its content.
        is_part: whether the model is the language model of a vision-language model.
    """

    def __init__(self, values: dict[str, JsonValue], is_part: bool = False) -> None:
        self.values, self.is_part = values, is_part

    @classmethod
    def read(cls, name: str) -> ModelConfig:
        """Read the config of a model's folder or hub ID, with the defaults of its class; of a
        vision-language model, the config of its language model.

        Raises:
            ConfigError: there is none that transformers can read.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        content = read_raw_config(name) or {}
        if content.get("auto_map") and content.get("model_type") not in CONFIG_MAPPING:
            return cls(dict(content))  # its own code would read it
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "the config of {name} cannot be read: {reason}",
                code="gguf-config-unreadable",
                allowed="a folder of `save_pretrained`",
                name=name,
                reason=str(error).partition("\n")[0],
            ) from error
        text = config.get_text_config()
        values = json.loads(text.to_json_string(use_diff=False))
        if text is config:
            return cls(values)
        values["tie_word_embeddings"] = config.tie_word_embeddings
        return cls(values, is_part=True)

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self.values.get(key)
        if isinstance(value, int | float) and int(value) == value:
            return int(value)
        if value is None and default is not None:
            return default
        raise self._missing(key, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self.values.get(key)
        if isinstance(value, int | float):
            return float(value)
        if value is None and default is not None:
            return default
        raise self._missing(key, "a number")

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.values.get(key)
        return value if isinstance(value, str) else default

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether a value is true."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    def texts(self, key: str) -> list[str]:
        """Return the texts of a list; an empty list without one."""
        value = self.values.get(key)
        return [str(each) for each in value] if isinstance(value, list) else []

    def wholes(self, key: str) -> list[int]:
        """Return the integers of a list; an empty list without one."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else []
        return [int(each) for each in items if isinstance(each, int | float)]

    def section(self, key: str) -> ModelConfig:
        """Return an object in the config; an empty one without it."""
        value = self.values.get(key)
        return ModelConfig(value if isinstance(value, dict) else {})

    @property
    def num_layers(self) -> int:
        return self.whole("num_hidden_layers")

    @property
    def num_heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self.whole("num_key_value_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.whole("head_dim", self.whole("hidden_size") // self.num_heads)

    @property
    def num_experts(self) -> int:
        """The number of experts in a layer; 0 for a dense model."""
        for key in ("num_experts", "num_local_experts", "n_routed_experts"):
            if key in self:
                return self.whole(key)
        return 0

    @property
    def rope(self) -> ModelConfig:
        """The parameters of the rotary embedding, as transformers 5 and earlier versions name
        them."""
        for key in ("rope_parameters", "rope_scaling"):
            if key in self:
                return self.section(key)
        return ModelConfig({})

    @property
    def rope_theta(self) -> float:
        return self.rope.number("rope_theta", self.number("rope_theta", 10000.0))

    def _missing(self, key: str, kind: str) -> ConfigError:
        return ConfigError(
            "config.json has no `{key}` that is {kind}: {value}",
            code="gguf-config-value",
            key=key,
            kind=kind,
            value=str(self.values.get(key)),
        )

"""The tools of an environment, as chat templates describe them to a model."""

import json
from functools import lru_cache

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.core.user_code import load_environment, tool_methods
from paceline.data.sources.rows import Row


def tools_of(config: Config) -> tuple[Row, ...]:
    """Return the descriptions of the tools of the config's environment; none without one."""
    if config.grpo.environment is None:
        return ()
    return environment_tools(config.grpo.environment)


@lru_cache(maxsize=8)
def environment_tools(text: str) -> tuple[Row, ...]:
    """Return the descriptions of the tools of an environment, from the type hints and the
    docstrings of its methods.

    Args:
        text: the class, as in ``grpo.environment``.

    Raises:
        ConfigError: the class is not an environment, or a tool cannot be described.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    tools: list[Row] = []
    for name, method in tool_methods(load_environment(text)).items():
        try:
            tools.append(json.loads(json.dumps(get_json_schema(method))))
        except Exception as error:  # hints that name no type raise errors of any type
            raise ConfigError(
                "`grpo.environment: {text}`: the method {name} cannot be a tool: {reason}",
                code="tool-without-description",
                allowed="methods with type hints, and a docstring that describes them and, below"
                " `Args:`, each argument",
                fix="add what is missing, or begin its name with an underscore if the model must"
                " not call it",
                text=text,
                name=name,
                reason=first_line(error),
            ) from error
    return tuple(tools)

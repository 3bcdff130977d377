"""Load the reward functions of the user, and check what can be checked before a run. Imports no
torch."""

import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from paceline.config.packages import check_package
from paceline.config.schema import Config
from paceline.config.schema.rewards import MATH_REWARDS, OF_ENVIRONMENT, RewardEntry
from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.core.user_code import import_user_module, load_environment
from paceline.models.json_config import read_object

_FORM = "./file.py:NAME or package.module:NAME"
RewardFunction = Callable[..., object]
#: Keyword arguments of every reward function, besides the columns of the rows.
ARGUMENTS = ("prompts", "completions", "completion_ids", "step")
#: Keyword argument with the environment of each completion, if there are any.
ENVIRONMENTS = "environments"
#: Keyword arguments of TRL that cannot be sent to another process.
_ONLY_IN_TRL = ("trainer_state", "log_extra", "log_metric")


def load_function(text: str) -> RewardFunction:
    """Return the function that ``./file.py:NAME`` or ``package.module:NAME`` names.

    Raises:
        ConfigError: the file, the module or the function does not exist, or user code raised an
            exception; the message shows the line.
    """
    location, _, name = text.strip().rpartition(":")
    module = import_user_module(location, f"rewards: {text}", _FORM)
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function) or inspect.isclass(function):
        problem = f"{location} has no function {name}"
        if hasattr(module, name):
            problem = f"{name} in {location} is not a function"
        names = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            "`rewards: [{function: {text}}]`: {problem}",
            code="unknown-reward-function",
            allowed="functions in it: {names}",
            fix=did_you_mean(name, names, "check the name"),
            text=text,
            problem=problem,
            names=", ".join(names) or "none",
        )
    return function


def file_of(function: RewardFunction) -> str:
    """Return the file that defines a function."""
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    return str(getattr(module, "__file__", None) or "unknown file")


def required_columns(
    function: RewardFunction, text: str, has_environment: bool = False
) -> list[str]:
    """Return the columns that a function requires: its parameters without a default.

    Args:
        has_environment: whether there are environments to pass.

    Raises:
        ConfigError: the function cannot be called with the arguments of a reward function.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return []
    problem = None
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        problem = "it has no **kwargs, and every column of the data is an argument"
    required = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    for each in required:
        if each.kind is each.POSITIONAL_ONLY:
            problem = f"its parameter {each.name} is positional, and arguments are passed by name"
        elif each.name in _ONLY_IN_TRL:
            problem = f"its parameter {each.name} has no default, and only TRL passes it"
        elif each.name == ENVIRONMENTS and not has_environment:
            problem = f"its parameter {each.name} has no default, and `grpo.environment` is not set"
    if problem is not None:
        raise ConfigError(
            "the reward function {text} cannot be called: {problem}",
            code="reward-signature",
            allowed="def NAME(prompts, completions, completion_ids, step, **kwargs)",
            fix="add **kwargs, and parameters only for the columns that it reads",
            text=text,
            problem=problem,
        )
    return [each.name for each in required if each.name not in (*ARGUMENTS, ENVIRONMENTS)]


def needed_columns(config: Config) -> list[str]:
    """Return the columns of the data that the rewards of a config require, each once.

    Raises:
        ConfigError: a reward function does not exist or cannot be called.
    """
    columns: list[str] = []
    has_environment = config.grpo.environment is not None
    for entry in config.rewards:
        if entry.function is not None:
            function = load_function(entry.function)
            columns += required_columns(function, entry.function, has_environment)
        elif entry.answer_column is not None:
            columns.append(entry.answer_column)
    return list(dict.fromkeys(columns))


def check_reset(text: str, columns: Collection[str]) -> None:
    """Check that the method ``reset`` of an environment can be called with the rows of the data.

    Args:
        text: the class, as in ``grpo.environment``.
        columns: the columns of the data besides ``prompt``.

    Raises:
        ConfigError: it requires another column, or does not accept one.
    """
    reset: Callable[..., object] = load_environment(text).reset  # type: ignore[attr-defined]
    try:
        bind = inspect.signature(reset).bind
    except (TypeError, ValueError):  # a function written in C
        return
    try:
        bind(None, **dict.fromkeys([*columns, "prompt"]))
    except TypeError as error:
        raise ConfigError(
            "`grpo.environment: {text}`: `reset` cannot be called with the columns of the data:"
            " {reason}",
            code="reset-signature",
            allowed="the columns {known}, by name",
            fix="add **kwargs for the columns that it does not read, and name the others as in the"
            " data, or with `dataset: {path: …, columns: {COLUMN: YOURS}}`",
            text=text,
            reason=error,
            known=", ".join(sorted([*columns, "prompt"])),
        ) from error


def check_environment(config: Config) -> None:
    """Check that the environment of a config exists, and that it computes rewards if it must.

    Raises:
        ConfigError: it does not exist, or it is not an environment, or it has no rewards.
    """
    text = config.grpo.environment
    if text is None:
        return
    found = load_environment(text)
    has_reward = any(entry.name == OF_ENVIRONMENT for entry in config.rewards)
    if has_reward and not callable(getattr(found, "get_reward", None)):
        raise ConfigError(
            "`rewards: [{name: environment}]`: the class of `grpo.environment: {text}` has no"
            " method `get_reward`",
            code="environment-without-reward",
            allowed="a method `get_reward(self)` that returns a number",
            fix="add the method, or use a reward function, which gets the `environments`",
            text=text,
        )


def environment_notices(config: Config) -> list[Notice]:
    """Return that an environment computes rewards which do not count, if that is so."""
    text = config.grpo.environment
    if text is None or any(entry.name == OF_ENVIRONMENT for entry in config.rewards):
        return []
    if not callable(getattr(load_environment(text), "get_reward", None)):
        return []
    message = UserText(
        "the method `get_reward` of `grpo.environment: {text}` is not called: `rewards` does not"
        " contain `{name: environment}`",
        code="reward-of-environment-unused",
        text=text,
    )
    return [Notice("warning", message)]


def check_reward_sources(config: Config) -> None:
    """Check that the functions, packages and models of the rewards exist, before anything starts.

    Raises:
        ConfigError: one does not exist or cannot be used.
    """
    for entry in config.rewards:
        if entry.name in MATH_REWARDS:
            advice = "use `{name: exact}`, which compares texts and numbers"
            needed_by = f"`rewards: [{{name: {entry.name}}}]`"
            check_package("math_verify", needed_by, advice, extra="math")
        if entry.model is not None:
            check_reward_model(entry)
    check_environment(config)
    needed_columns(config)


def check_reward_model(entry: RewardEntry) -> None:
    """Raise ConfigError unless the folder of a reward model holds a classifier with one label."""
    folder = Path(str(entry.model)).expanduser()
    content = read_object(folder / "config.json")
    if content is None:
        is_adapter = (folder / "adapter_config.json").is_file()
        raise ConfigError(
            "the reward model {folder} {problem}",
            code="reward-model-missing",
            allowed="the folder of a model that `task: reward` has trained",
            fix=(
                "merge the adapter first: paceline export RUN --merge"
                if is_adapter
                else "check the path; download a model of a hub first"
            ),
            folder=entry.model,
            problem=(
                "is an adapter without its base model" if is_adapter else "has no valid config.json"
            ),
        )
    names = content.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    labels = content.get("id2label", content.get("num_labels"))
    # transformers writes no labels if there are two, its default.
    count = len(labels) if isinstance(labels, dict) else labels if isinstance(labels, int) else 2
    if not architecture.endswith("ForSequenceClassification") or count != 1:
        raise ConfigError(
            "the reward model {folder} is a {architecture} with {count:label}",
            code="not-a-reward-model",
            allowed="a model for sequence classification with one label, the reward",
            fix="train one with `task: reward`",
            folder=entry.model,
            architecture=architecture,
            count=count,
        )

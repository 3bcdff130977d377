"""The argument parser of all commands, and what their options share: argument types, and the config
with its overrides."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.commands.help_text import command_lines, describe_problem, usage_of
from paceline.core.errors import ConfigError, did_you_mean, nearest
from paceline.core.formatting import printable
from paceline.core.log import LEVELS, log_notices

if TYPE_CHECKING:
    from paceline.config.load import Loaded

#: Names under which other programs have `--output`.
_NAMES_OF_OUTPUT = ("html", "out", "output-file", "save", "json-file")
_CONFIG_HELP = (
    "Override config keys with key=value, --key value or --key=value; nested keys have dotted"
    " names. `paceline config` lists all keys."
)


class InvalidValue(Exception):
    """A value that an option does not accept.

    Args:
        reason: the rest of the sentence; the parser puts the option and its value before it.
    """

    def __init__(self, reason: str, *, allowed: str | None = None, fix: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.allowed = allowed
        self.fix = fix


class ArgumentType(Protocol):
    """Convert the text of an option. ``allowed``: the accepted values, for the help."""

    @property
    def allowed(self) -> str: ...

    def __call__(self, text: str) -> Any: ...


@dataclass(frozen=True)
class AnyText:
    """Any text; an empty one only if ``may_be_empty``."""

    allowed: str = "text"
    may_be_empty: bool = True

    def __call__(self, text: str) -> str:
        if not text and not self.may_be_empty:
            raise InvalidValue("is empty", allowed=self.allowed)
        return text


@dataclass(frozen=True)
class Integer:
    """An integer in a range, which has no upper limit if ``maximum`` is None. ``range_text``: how
    the help describes the range, if not by its limits."""

    minimum: int | None = None
    maximum: int | None = None
    range_text: str | None = None

    @property
    def allowed(self) -> str:
        if self.range_text is not None:
            return self.range_text
        if self.minimum is None:
            return "an integer"
        if self.maximum is None:
            return f"{self.minimum} or more"
        return f"{self.minimum:,} to {self.maximum:,}"

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            allowed = None if self.minimum is None else self.allowed
            raise InvalidValue("is not an integer", allowed=allowed) from error
        too_low = self.minimum is not None and number < self.minimum
        if too_low or (self.maximum is not None and number > self.maximum):
            raise InvalidValue("is out of range", allowed=self.allowed)
        return number


@dataclass(frozen=True)
class Number:
    """A floating-point number. ``limits``: the lowest one, and the one that all are below."""

    allowed: str = "a number"
    limits: tuple[float, float] | None = None

    def __call__(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError as error:
            allowed = None if self.limits is None else self.allowed
            raise InvalidValue("is not a number", allowed=allowed) from error
        if self.limits is not None and not self.limits[0] <= number < self.limits[1]:
            raise InvalidValue("is out of range", allowed=self.allowed)
        return number


@dataclass(frozen=True)
class Choice:
    """One of a few values. ``renamed``: former names, which the error answers with the new ones."""

    values: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        return ", ".join(self.values)

    def __call__(self, text: str) -> str:
        if text not in self.values:
            raise InvalidValue(
                "is unknown",
                allowed=self.allowed,
                fix=f"use `{self.renamed[text]}`, its new name"
                if text in self.renamed
                else did_you_mean(text, self.values, "choose one of these"),
            )
        return text


@dataclass(frozen=True)
class CommaList:
    """Values of one type, separated by commas, without duplicates and in the same order."""

    element: ArgumentType

    @property
    def allowed(self) -> str:
        return f"{self.element.allowed}; comma-separated"

    def __call__(self, text: str) -> tuple[Any, ...]:
        values = [self.element(part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise InvalidValue("is an empty list", allowed=self.allowed)
        return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class OutputFile:
    """A file to write. ``kind``: such as ``an HTML file``."""

    kind: str = "a file"

    @property
    def allowed(self) -> str:
        return f"{self.kind} in an existing folder"

    def __call__(self, text: str) -> Path:
        path = Path(text).expanduser()
        folder = path.absolute().parent
        if not text or path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InvalidValue("cannot be written", allowed=self.allowed, fix=f"name {self.kind}")
        return path


@dataclass(frozen=True)
class Pattern:
    """Text that matches a regular expression completely."""

    regex: str
    allowed: str

    def __call__(self, text: str) -> str:
        if re.fullmatch(self.regex, text) is None:
            raise InvalidValue("does not have the required form", allowed=self.allowed)
        return text


@dataclass(frozen=True)
class AnyPath:
    """A path that the command checks itself."""

    allowed: str = "a path"

    def __call__(self, text: str) -> Path:
        if not text:
            raise InvalidValue("is empty", allowed=self.allowed)
        return Path(text)


class OptionParser(argparse.ArgumentParser):
    """An :class:`argparse.ArgumentParser` that raises ConfigError.

    It accepts ``--world_size`` for ``--world-size`` but no abbreviations, and adds the accepted
    values and the default of each option to the help.
    """

    #: Shown at the end of the help.
    example: str | None = None

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        **settings: Any,
    ) -> None:
        #: The parsers of the commands below this one, by name; an alias has its own entry.
        self.commands: dict[str, OptionParser] = {}
        #: Every option by its longest name, such as ``--world-size``.
        self.options: dict[str, argparse.Action] = {}
        self.positionals: list[argparse.Action] = []
        #: Whether the command accepts a config and overrides, see :func:`add_config`.
        self.takes_config = False
        self.takes_only_known_keys = False
        self._command_list: Any = None
        #: The line of each command in the help, by group.
        self._groups: dict[str, dict[str, str]] = {}
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30),
            allow_abbrev=False,
            exit_on_error=False,
            **settings,
        )

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Extend argparse's method: an error of ``type`` names the option and the value."""
        reader = settings.get("type")
        if reader is not None:
            settings["type"] = _NamedType(names[0] if names[0].startswith("-") else "", reader)
            text = settings.get("help", "")
            if settings.get("default") is not None and "(default: " not in text:
                text += " (default: %(default)s)"
            allowed = reader.allowed.replace("%", "%%")
            settings["help"] = f"{text} [{allowed}]"
        action = super().add_argument(*names, **settings)
        if action.option_strings:
            self.options[action.option_strings[-1]] = action
        else:
            self.positionals.append(action)
        return action

    def add_option(
        self, name: str, kind: ArgumentType, metavar: str, description: str, **settings: Any
    ) -> None:
        """Add an option or an argument with a value of a kind."""
        self.add_argument(name, type=kind, metavar=metavar, help=description, **settings)

    def add_flag(self, name: str, description: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=description)

    def add_command(
        self, name: str, summary: str, aliases: Sequence[str] = (), group: str = "commands"
    ) -> OptionParser:
        """Add a subcommand, such as `count` of `data`, which the help lists under a group."""
        if self._command_list is None:
            self._command_list = self.add_subparsers(
                help=argparse.SUPPRESS, parser_class=OptionParser
            )
        command: OptionParser = self._command_list.add_parser(
            name,
            aliases=aliases,
            prog=f"{self.prog} {name}",
            description=f"{summary[0].upper()}{summary[1:]}.",
        )
        self.commands.update(dict.fromkeys([name, *aliases], command))
        self._groups.setdefault(group, {})[", ".join([name, *aliases])] = summary
        return command

    def resolve(self, tokens: Sequence[str]) -> tuple[OptionParser, list[str]]:
        """Return the parser of the command that ``tokens`` name, and its remaining tokens.

        Raises:
            ConfigError: there is no such command.
        """
        name = next((token for token in tokens if not token.startswith("-")), None)
        if not self.commands or (name is None and {"-h", "--help"} & set(tokens)):
            return self, list(tokens)
        if name not in self.commands:
            suggestion = nearest(name or "", self.commands)
            raise ConfigError(
                "`{prog} {name}`: unknown command" if name else "`{prog}` needs a command",
                code="unknown-command" if name else "missing-command",
                allowed=", ".join(self.commands),
                fix="run `{prog} {suggestion}`",
                prog=self.prog,
                name=name,
                suggestion=suggestion or "--help",
            )
        rest = list(tokens)
        rest.remove(name)
        return self.commands[name].resolve(rest)

    def parse(self, tokens: Sequence[str]) -> argparse.Namespace:
        """Parse the options of a command. The result also has ``command``, which is this parser,
        and ``config_tokens``, which are the remaining tokens.

        Raises:
            ConfigError: an option or an argument is unknown, missing or invalid.
        """
        self._tokens = list(tokens)
        read = self.parse_known_intermixed_args if self.positionals else self.parse_known_args
        try:
            args, rest = read([self._with_dashes(token) for token in tokens])
        except argparse.ArgumentError as error:
            if error.argument_name is None:
                self.error(error.message)
            name = str(error.argument_name).rpartition("/")[2]
            raise ConfigError(
                "`{name}` {problem}",
                code="invalid-arguments",
                fix="see `{prog} --help`",
                name=name,
                problem=describe_problem(error.message),
                prog=self.prog,
            ) from error
        self._check_unknown(rest)
        args.command = self
        args.config_tokens = rest
        return args

    def error(self, message: str) -> Any:
        """Raise ConfigError for missing or unexpected arguments."""
        raise ConfigError(
            "`{prog}` has missing or unexpected arguments",
            code="unexpected-arguments",
            allowed=self.usage_line(),
            fix="see `{program} --help`",
            prog=" ".join([self.prog, *self._tokens]),
            program=self.prog,
        )

    def usage_line(self) -> str:
        """Return the command with its arguments."""
        names = ["COMMAND"] if self.commands else []
        names += ["[CONFIG.yaml] [key=value ...]"] if self.takes_config else []
        names += [usage_of(action) for action in self.positionals if action.metavar]
        return " ".join([self.prog, *names])

    def format_help(self) -> str:
        width = max(get_terminal_size().columns - 2, 40)
        usage = fill(f"{self.usage_line()} [options]", width - 7, subsequent_indent=" " * 9)
        self.usage, self.description = usage, fill(self.description or "", width)
        notes = [fill(_CONFIG_HELP, width)] if self.takes_config else []
        notes += [f"example:\n  {self.example}"] if self.example else []
        self.epilog = "\n\n".join(notes) or self.epilog
        before, title, options = super().format_help().partition("\noptions:\n")
        return f"{before}{command_lines(self._groups, width)}{title}{options}"

    def _with_dashes(self, token: str) -> str:
        name, equals, value = token.partition("=")
        dashed = name.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in self.options else token

    def _check_unknown(self, tokens: Sequence[str]) -> None:
        """Raise ConfigError for a token that looks like an option but is not one."""
        names = [name.removeprefix("--") for name in self.options]
        for token in tokens:
            key = token[2:].partition("=")[0]
            if not token.startswith("--") or (self.takes_config and _is_config_key(key)):
                continue
            loose = self.takes_config and not self.takes_only_known_keys
            cutoff = 0.8 if loose else 0.6
            question = did_you_mean(key.replace("_", "-"), names, form="`--{}`", cutoff=cutoff)
            if key in _NAMES_OF_OUTPUT and "output" in names:
                question = f"use `--output`: {self.options['--output'].help}"
            if question or not loose:
                raise ConfigError(
                    "`{prog}` has no option `--{key}`",
                    code="unknown-option",
                    allowed=(None) if loose else (", ".join(sorted(self.options))),
                    fix=question or "omit it",
                    prog=self.prog,
                    key=key,
                )
        if tokens and not self.takes_config:
            self.error("")


class _NamedType:
    """An argument type whose errors name the option (unless it is positional) and the value."""

    def __init__(self, name: str, reader: ArgumentType) -> None:
        self.name = name
        self.reader = reader

    def __call__(self, text: str) -> Any:
        try:
            return self.reader(text)
        except InvalidValue as error:
            argument = f"{self.name} {printable(text, 200)}".strip()
            raise ConfigError(
                "`{argument}` {reason}",
                code="invalid-option",
                allowed=error.allowed,
                fix=error.fix,
                argument=argument,
                reason=error.reason,
            ) from error


def _is_config_key(key: str) -> bool:
    from paceline.config.compat.keys import alias_of
    from paceline.config.fields import KEYS

    key = key.replace("-", "_")
    return (
        key == "config"
        or "." in key
        or key in KEYS
        or f"train_args.{key}" in KEYS
        or alias_of("", key) is not None
    )


def set_up(parser: OptionParser, module: ModuleType) -> None:
    """Add the options of the module that implements a command, and the options of every command."""
    module.add_arguments(parser)
    if parser.commands:
        return  # Its subcommands have their own.
    parser.set_defaults(run=module.run)
    parser.add_flag("--json", "print only the result, as JSON")
    parser.add_flag("--debug", "show the traceback of an error")
    parser.add_flag("--quiet", "print only warnings and errors")
    parser.add_option(
        "--log-level", Choice(LEVELS), "LEVEL", "print messages of this level and above"
    )


def add_config(parser: OptionParser, *, only_known_keys: bool = False) -> None:
    """Accept a config file and overrides. ``only_known_keys``: report an unknown `--name` while
    parsing instead of when the config is loaded."""
    parser.takes_config = True
    parser.takes_only_known_keys = only_known_keys


def config_and_overrides(args: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the config file (None if none is named) and the overrides.

    Raises:
        ConfigError: see :func:`paceline.config.overrides.split_cli`.
    """
    from paceline.config.overrides import split_cli

    return split_cli(args.config_tokens)


def load_fitted_config(args: argparse.Namespace) -> Loaded:
    """Load the config, with `max_length` fitted to the model's positions.

    Raises:
        ConfigError: the config is invalid.
    """
    from paceline.models.files import fit_to_model

    return fit_to_model(load_job_config(args))


def load_job_config(args: argparse.Namespace, builtin: Sequence[str] = ()) -> Loaded:
    """Load the config, and hide the packages that it does not use from this process.

    Args:
        builtin: overrides that name a model and a dataset, for a command without a config. The
            user's take precedence.

    Raises:
        ConfigError: the config is invalid.
    """
    from paceline.config.load import load_config
    from paceline.config.packages import unused_packages
    from paceline.core.user_code import hide_packages

    path, overrides = config_and_overrides(args)
    keys = [override.lstrip("-").partition("=")[0] for override in overrides]
    if path is None and "model" not in keys:
        names = {key.rpartition(".")[2] for key in keys}
        defaults = [text for text in builtin if text.partition("=")[0] not in names]
        overrides = [*defaults, *overrides]
    loaded = load_config(path, overrides)
    hide_packages(unused_packages(loaded.config))
    return loaded


def print_notices(notices: Iterable[tuple[str, str]]) -> None:
    """Print notices (level, text) on standard error."""
    log_notices(logging.getLogger(__name__), notices)

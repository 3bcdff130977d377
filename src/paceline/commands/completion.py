"""`paceline completion`: print a completion script for a shell, generated from the parser.

The script completes commands, options, the values that an option accepts, and file names.
"""

import json
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator

from paceline.commands.options import Choice, CommaList, OptionParser
from paceline.core.errors import EXIT_DONE


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("shell", Choice(tuple(_SCRIPTS)), "SHELL", "shell to write for")
    parser.example = 'eval "$(paceline completion bash)"   # in ~/.bashrc'


def run(args: Namespace) -> int:
    """Print the script."""
    script = _SCRIPTS[args.shell](args.build_parser())
    print(json.dumps({"shell": args.shell, "script": script}) if args.json else script, end="")
    return EXIT_DONE


def _commands(parser: OptionParser, path: str = "") -> Iterator[tuple[str, OptionParser]]:
    """Yield every command of ``parser`` with its path, such as ``data count``."""
    for name, command in parser.commands.items():
        yield f"{path}{name}", command
        yield from _commands(command, f"{path}{name} ")


def _candidates(command: OptionParser) -> list[str]:
    """Return what may follow a command: subcommands, choices of its arguments, and options."""
    arguments = [value for action in command.positionals for value in _choices(action.type)]
    return [*command.commands, *arguments, *command.options]


def _choices(argument_type: object) -> tuple[str, ...]:
    reader = getattr(argument_type, "reader", None)
    if isinstance(reader, CommaList):
        reader = reader.element
    return reader.values if isinstance(reader, Choice) else ()


def _value_cases(command: OptionParser) -> dict[str, tuple[str, ...]]:
    """Return the options of a command that take a value, with the accepted values (empty: file
    names or anything)."""
    return {
        name: _choices(action.type) for name, action in command.options.items() if action.nargs != 0
    }


def _case_table(parser: OptionParser) -> str:
    """Return the lines of a `case` statement over the command and the previous argument, which set
    `candidates`."""
    lines = []
    for path, command in _commands(parser):
        for option, choices in _value_cases(command).items():
            lines.append(
                f"    {shlex.quote(f'{path}:{option}')}) candidates='{' '.join(choices)}' ;;"
            )
        lines.append(
            f"    {shlex.quote(f'{path}:')}*) candidates='{' '.join(_candidates(command))}' ;;"
        )
    lines.append(f"    *) candidates='{' '.join([*parser.commands, '--help', '--version'])}' ;;")
    return "\n".join(lines)


def _bash(parser: OptionParser) -> str:
    nested = " | ".join(f"'{path}'" for path, command in _commands(parser) if command.commands)
    return f"""\
# bash completion for paceline
_paceline() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" candidates
  local command=''
  (( COMP_CWORD > 1 )) && command="${{COMP_WORDS[1]}}"
  case "$command" in
    {nested}) (( COMP_CWORD > 2 )) && command="$command ${{COMP_WORDS[2]}}" ;;
  esac
  case "$command:$previous" in
{_case_table(parser)}
  esac
  COMPREPLY=($(compgen -W "$candidates" -- "$current"))
}}
complete -o default -F _paceline paceline
"""


def _zsh(parser: OptionParser) -> str:
    nested = " | ".join(f"'{path}'" for path, command in _commands(parser) if command.commands)
    return f"""\
#compdef paceline
_paceline() {{
  local previous="${{words[CURRENT-1]}}" command='' candidates=''
  (( CURRENT > 2 )) && command="${{words[2]}}"
  case "$command" in
    {nested}) (( CURRENT > 3 )) && command="$command ${{words[3]}}" ;;
  esac
  case "$command:$previous" in
{_case_table(parser)}
  esac
  compadd -- ${{=candidates}}
  _files
}}
compdef _paceline paceline
"""


def _fish(parser: OptionParser) -> str:
    lines = ["# fish completion for paceline"]
    for name in parser.commands:
        lines.append(f"complete -c paceline -n __fish_use_subcommand -f -a {name}")
    for path, command in _commands(parser):
        condition = " && ".join(f"__fish_seen_subcommand_from {name}" for name in path.split())
        prefix = f"complete -c paceline -n '{condition}'"
        arguments = [value for value in _candidates(command) if not value.startswith("-")]
        if arguments:
            lines.append(f"{prefix} -a '{' '.join(arguments)}'")
        for name, choices in _value_cases(command).items():
            values = f" -x -a '{' '.join(choices)}'" if choices else " -r"
            lines.append(f"{prefix} -l {name.removeprefix('--')}{values}")
        for name, action in command.options.items():
            if action.nargs == 0:
                lines.append(f"{prefix} -l {name.removeprefix('--')}")
    return "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[OptionParser], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

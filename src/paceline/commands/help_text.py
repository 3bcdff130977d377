"""Parts of the help of a command, and of the errors of its options."""

import argparse
from collections.abc import Mapping
from textwrap import fill


def command_lines(groups: Mapping[str, Mapping[str, str]], width: int) -> str:
    """Return the commands in their groups, with a blank line before each group.

    Args:
        groups: the summary of each command, by group.
    """
    names = [name for group in groups.values() for name in group]
    column = 4 + max(map(len, names), default=0)
    lines = []
    for group, summaries in groups.items():
        lines += ["", f"{group}:"]
        for name, summary in summaries.items():
            label = f"  {name}".ljust(column)
            lines.append(fill(summary, width, initial_indent=label, subsequent_indent=" " * column))
    return "".join(f"{line}\n" for line in lines)


def usage_of(action: argparse.Action) -> str:
    """Return an argument as the usage shows it: in brackets if it may be left out."""
    name = str(action.metavar)
    return f"[{name}{' ...' * (action.nargs == '*')}]" if action.nargs in ("?", "*") else name


def describe_problem(message: str) -> str:
    """Return what argparse reports about an option as the rest of a sentence."""
    if "not allowed with" in message:
        return f"is not supported with `{message.rpartition(' ')[2]}`"
    return "needs a value" if "expected" in message else "accepts no value"

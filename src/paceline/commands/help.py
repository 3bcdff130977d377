"""`paceline help`: explain the code of an error or a notice."""

from __future__ import annotations

from argparse import Namespace
from typing import TypedDict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.commands.options import AnyText, OptionParser
from paceline.commands.reports import print_report
from paceline.core.errors import EXIT_DONE, ConfigError, did_you_mean
from paceline.messages.catalogue import CodeText, cause_of, codes


class CodeHelp(TypedDict):
    """What a code means.

    Args:
        texts: wordings, with ``{name}`` for values; one for each place that uses the code.
    """

    code: str
    kind: str
    cause: str
    texts: list[CodeText]


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "code", AnyText("a code or a command"), "CODE", "code at the end of an error, or a command"
    )
    parser.example = "paceline help unknown-key"


def run(args: Namespace) -> int:
    """Explain a code, or list the options of a command."""
    is_code = args.code.strip("[]") in codes()
    commands = {} if is_code or args.json else args.build_parser().commands
    if args.code in commands:
        print(commands[args.code].format_help(), end="")
        return EXIT_DONE
    print_report(args, explain_code(args.code), _detail)
    return EXIT_DONE


def explain_code(code: str) -> CodeHelp:
    """Return the meaning of a code, which may have its brackets.

    Raises:
        ConfigError: there is no such code.
    """
    code = code.strip("[]")
    entry = codes().get(code)
    if entry is None:
        raise ConfigError(
            "`{code_name}` is not the code of an error or a notice",
            code="unknown-code",
            allowed="a code in brackets, as at the end of an error",
            fix=did_you_mean(code, codes(), "copy the code from the end of the error", cutoff=0.5),
            code_name=code,
        )
    return CodeHelp(code=code, kind=entry["kind"], cause=cause_of(entry), texts=entry["texts"])


def _detail(code: CodeHelp) -> Group:
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for text in code["texts"]:
        rows.add_row("message", Text(text["what"]))
        if text["allowed"]:
            rows.add_row("allowed", Text(text["allowed"]))
        if text["fix"]:
            rows.add_row("to fix", Text(text["fix"]))
    rows.add_row("cause", Text(code["cause"]))
    return Group(Text(code["code"], style="bold"), rows)

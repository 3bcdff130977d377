"""The command line: parser, error messages and exit codes. Each command is a module of
:mod:`paceline.commands`."""

import atexit
import contextlib
import os
import sys
from collections.abc import Collection
from functools import partial
from importlib import import_module

from paceline.commands.options import OptionParser, set_up
from paceline.core.errors import (
    ERROR_FILE,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_SIGINT,
    PacelineError,
    RunError,
    write_error,
)
from paceline.core.log import configure_logging
from paceline.version import __version__

#: Name and summary of every command, by group.
VERB_GROUPS = {
    "train": {
        "init": "write a config for a model and a dataset",
        "sft": "train a model from a config",
        "sweep": "train every combination of some overrides, or search for the best values",
        "watch": "follow a run from another terminal",
        "ui": "view and start runs in the browser",
    },
    "before a run": {
        "plan": "estimate memory, traffic and time of each parallel mode",
        "verify": "train a few steps under each parallel mode and check that they agree",
        "doctor": "check this machine and the network between ranks",
        "bench": "measure how a config scales, what each setting gains, or the collectives",
        "data": "preview a dataset, or show its statistics or word counts",
    },
    "after a run": {
        "generate": "generate text with the model of a run",
        "serve": "answer requests in the form of OpenAI's API with the model of a run",
        "eval": "evaluate the model of a run with lm-evaluation-harness",
        "export": "write the model of a run for transformers, vLLM, llama.cpp or Ollama",
        "compare": "compare the losses, configs and weights of two runs",
        "inspect": "show the tensors and the digest of a checkpoint",
    },
    "several machines": {
        "slurm": "write a Slurm batch script",
        "kubernetes": "write Kubernetes manifests",
        "ray": "train on a Ray cluster",
    },
    "help": {
        "config": "explain the keys of a config",
        "convert": "write a config of another tool with Paceline's own keys",
        "explain": "run an algorithm on real ranks and show it step by step",
        "completion": "print a shell completion script",
        "help": "explain the code of an error, or a command",
    },
}
VERBS = {name: text for group in VERB_GROUPS.values() for name, text in group.items()}
ALIASES = {"train": "sft"}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Return the exit code: 0 done, 1 failed, 2 invalid usage or config, 130 or
    143 stopped by a signal."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens
    error_file = os.environ.pop(ERROR_FILE, None)  # commands that this one starts do not write it
    try:
        return _dispatch(tokens)
    except PacelineError as error:
        _print_error(error.printed())
        write_error(error, error_file)
        if debug:
            raise
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C; all processes have ended", file=sys.stderr)
        return EXIT_SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        unexpected = RunError(
            "{kind}: {reason}. This is unexpected",
            code="unexpected",
            fix="run again with --debug for the full traceback",
            kind=type(error).__name__,
            reason=error,
        )
        _print_error(unexpected.printed())
        write_error(unexpected, error_file)
        return EXIT_FAILED


def entry() -> None:
    """Run the console script: :func:`main`, but without finalizing the interpreter."""
    code = main()
    # With torch loaded, finalization frees every module, which takes about a second for nothing.
    # multiprocessing still has to remove its semaphores in an exit function, and `atexit` has no
    # public way to call exit functions.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def build_parser(names: Collection[str]) -> OptionParser:
    """Build the parser of the command line, with the options of the commands in ``names``: the
    modules of other commands are not imported."""
    parser = OptionParser("paceline", "Train PyTorch models on all of your devices.")
    parser.add_argument(
        "--version", action="version", version=__version__, help="print the version"
    )
    parser.example = "paceline sft model=builtin:qwen2-tiny dataset=builtin:python-docs"
    for group, verbs in VERB_GROUPS.items():
        for name, summary in verbs.items():
            aliases = [alias for alias, target in ALIASES.items() if target == name]
            verb = parser.add_command(name, summary, aliases, group)
            if name in names or any(alias in names for alias in aliases):
                set_up(verb, import_module(f"paceline.commands.{name}"))
    return parser


def _dispatch(tokens: list[str]) -> int:
    if tokens[:1] == ["--version"]:
        print(__version__)
        return EXIT_DONE
    if not tokens or tokens == ["help"]:
        tokens = ["--help"]
    verb = next((token for token in tokens if not token.startswith("-")), "")
    parser, rest = build_parser([verb]).resolve(tokens)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help(), end="")
        return EXIT_DONE
    args = parser.parse(rest)
    configure_logging(args.log_level, args.quiet)
    args.build_parser = partial(build_parser, VERBS)
    code: int = args.run(args)
    return code


def _print_error(text: str) -> None:
    has_color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    label = "\033[1;31merror:\033[0m" if has_color else "error:"
    with contextlib.suppress(OSError, ValueError):
        print(f"{label} {text}", file=sys.stderr)


if __name__ == "__main__":
    entry()

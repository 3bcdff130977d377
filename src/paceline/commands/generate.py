"""`paceline generate`: answer questions with the model of a run."""

import contextlib
import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.options import AnyPath, AnyText, Integer, Number, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from pydantic import JsonValue

_SAMPLING = ("max_new_tokens", "temperature", "system", "seed", "chat_template_kwargs")


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("run_dir", AnyPath("its output_dir"), "RUN", "run")
    parser.add_option(
        "questions",
        AnyText(),
        "QUESTION",
        "question to answer, or several; not with --serve",
        nargs="*",
    )
    parser.add_option(
        "--max-new-tokens", Integer(), "N", "maximum length of the answer in tokens (default: 128)"
    )
    parser.add_option(
        "--temperature",
        Number(),
        "T",
        "sampling temperature; 0, the default, selects the most likely token",
    )
    parser.add_option("--system", AnyText(), "TEXT", "system message")
    parser.add_option("--seed", Integer(), "N", "seed for sampling (default: 0)")
    parser.add_option(
        "--image",
        AnyPath("an image file"),
        "FILE",
        "image that precedes each question, for a vision-language model; may be repeated",
        action="append",
    )
    parser.add_option(
        "--chat-template-kwargs",
        AnyText("a JSON object"),
        "JSON",
        "variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_flag("--serve", "answer requests from standard input, one JSON per line")
    parser.add_option(
        "--device", AnyText("auto or cpu"), "NAME", "device, with --serve (default: auto)"
    )
    parser.example = 'paceline generate output/demo "What is a tuple?" --max-new-tokens 100'


def run(args: Namespace) -> int:
    """Print the answers: one line with `--json` for each question, else the text of each answer,
    below its question if there are several."""
    _check_combination(args)
    if args.serve:
        from paceline.inference.chat_server import serve

        return serve(args.run_dir, args.device or "auto")
    from paceline.inference.generate import answer_questions

    settings = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    arguments = _template_arguments(settings.pop("chat_template_kwargs", "{}"))
    # The output of libraries during import is not part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        answers = answer_questions(
            args.run_dir,
            args.questions,
            images=[*map(str, args.image or ())],
            template_arguments=arguments,
            **settings,
        )
    for question, answer in zip(args.questions, answers, strict=True):
        if args.json:
            print(json.dumps({"question": question, "answer": answer}, ensure_ascii=False))
        else:
            print(f"{question}\n  {answer}" if len(answers) > 1 else answer)
    return EXIT_DONE


def _template_arguments(text: str) -> dict[str, "JsonValue"]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError(
            "`--chat-template-kwargs {text}` is not a JSON object",
            code="invalid-template-arguments",
            allowed="a JSON object, such as {example}",
            text=text[:200],
            example="'{\"enable_thinking\": false}'",
        )
    return arguments


def _check_combination(args: Namespace) -> None:
    if args.serve:
        excluded = [name for name in (*_SAMPLING, "image") if getattr(args, name) is not None]
        excluded = ["questions", *excluded] if args.questions else excluded
    else:
        excluded = ["device"] if args.device is not None else []
        if not args.questions:
            raise ConfigError(
                "`paceline generate` needs a question",
                code="missing-question",
                allowed="paceline generate RUN QUESTION",
                fix="write the question in quotation marks after the run",
            )
    if excluded:
        name = "QUESTION" if excluded[0] == "questions" else f"--{excluded[0].replace('_', '-')}"
        state = "with" if args.serve else "without"
        raise ConfigError(
            "`{name}` is not supported {state} `--serve`",
            code="option-with-serve",
            fix="omit it",
            name=name,
            state=state,
        )

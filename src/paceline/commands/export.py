"""`paceline export`: write the model of a run in another form, and prove that it is the same."""

import contextlib
import json
import sys
from argparse import Namespace

from paceline.commands.options import AnyPath, AnyText, Number, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "run_dir",
        AnyPath("its output_dir, one of its checkpoints, or a folder of transformers or peft"),
        "RUN",
        "run",
    )
    parser.add_flag("--merge", "merge the adapter into the weights of the base model")
    parser.add_option(
        "--output",
        AnyText("a folder that does not exist yet"),
        "DIR",
        "folder to write the model to (default: RUN/exported)",
    )
    parser.add_option(
        "--dtype",
        AnyText("auto, float32, bfloat16, float16"),
        "DTYPE",
        "data type of the written weights",
        default="auto",
    )
    parser.add_option(
        "--limit",
        Number(),
        "X",
        "largest accepted difference from the trained model (default: depends on the form)",
    )
    parser.add_option(
        "--push",
        AnyText("OWNER/NAME"),
        "REPO",
        "upload the model with a model card to this repository of the Hugging Face hub:"
        " model/ as it is, or the form that another option chooses",
    )
    parser.add_flag(
        "--allow-missing",
        "also write the model if weights of the base model that it does not use are gone",
    )
    parser.add_flag("--private", "make a new repository private; with --push")
    parser.example = "paceline export output/demo --merge --output merged"


def run(args: Namespace) -> int:
    """Write or upload the model, and print where it is."""
    from paceline.inference.exports.export import export, push
    from paceline.inference.exports.registry import chosen_form
    from paceline.launch.after_training.hub_upload import check_repository

    if args.private and args.push is None:
        raise ConfigError(
            "`--private` is not supported without `--push`",
            code="private-without-push",
            fix="omit it",
        )
    result: dict[str, object] = {}
    exported = None
    with contextlib.redirect_stdout(sys.stderr):
        if args.push is not None:
            check_repository(args.push, f"`--push {args.push}`")
        if args.push is None or args.merge or args.output is not None:
            exported = export(
                args.run_dir,
                chosen_form(merge=args.merge, dtype=args.dtype),
                output=args.output,
                allow_missing=args.allow_missing,
                limit=args.limit,
            )
            result = {
                "path": str(exported.path),
                "format": exported.form,
                "bytes": exported.size_bytes,
                "check": exported.check.record(),
            }
        if args.push is not None:
            folder = None if exported is None else exported.path
            repository, url = push(args.run_dir, args.push, folder, args.private or None)
            result |= {"repository": repository, "url": url}
    if args.json:
        print(json.dumps(result))
        return EXIT_DONE
    if exported is not None:
        print(f"wrote {exported.path}")
        print(f"checked: {exported.check.text()}")
    if args.push is not None:
        print(f"uploaded to {result['repository']}: {result['url']}")
    return EXIT_DONE

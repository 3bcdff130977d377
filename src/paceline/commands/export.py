"""`paceline export`: write the merged model of a run."""

import contextlib
import json
import sys
from argparse import Namespace

from paceline.commands.options import AnyPath, AnyText, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("run_dir", AnyPath("its output_dir"), "RUN", "run")
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
        "--push",
        AnyText("OWNER/NAME"),
        "REPO",
        "upload the model with a model card to this repository of the Hugging Face hub:"
        " model/ as it is, or with --merge the merged model",
    )
    parser.add_flag(
        "--allow-missing",
        "also write the model if weights of the base model that it does not use are gone",
    )
    parser.add_flag("--private", "make a new repository private; with --push")
    parser.example = "paceline export output/demo --merge --output merged"


def run(args: Namespace) -> int:
    """Write or upload the model, and print where it is."""
    from paceline.inference.export import export, push
    from paceline.launch.after_training.hub_upload import check_repository

    if args.private and args.push is None:
        raise ConfigError(
            "`--private` is not supported without `--push`",
            code="private-without-push",
            fix="omit it",
        )
    result: dict[str, str | float] = {}
    comparison = None
    with contextlib.redirect_stdout(sys.stderr):
        if args.push is not None:
            check_repository(args.push, f"`--push {args.push}`")
        folder = None
        if args.push is None or args.merge or args.output is not None:
            exported = export(
                args.run_dir,
                merge=args.merge,
                output=args.output,
                dtype=args.dtype,
                allow_missing=args.allow_missing,
            )
            folder, comparison = exported.path, exported.comparison
            result["path"] = str(folder)
            if comparison is not None:
                result["max_logit_difference"] = comparison.max_difference
        if args.push is not None:
            repository, url = push(args.run_dir, args.push, folder, args.private or None)
            result |= {"repository": repository, "url": url}
    if args.json:
        print(json.dumps(result))
        return EXIT_DONE
    if folder is not None:
        print(f"wrote {folder}")
    if comparison is not None:
        print(f"checked: {comparison.text()}")
    if args.push is not None:
        print(f"uploaded to {result['repository']}: {result['url']}")
    return EXIT_DONE

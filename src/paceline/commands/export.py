"""`paceline export`: write the model of a run in another form, and prove that it is the same."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, TypedDict

from paceline.commands.options import AnyPath, AnyText, Choice, Number, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.inference.exports.gguf.tensor_types import KINDS
from paceline.inference.exports.quantized.layers import SCHEMES

if TYPE_CHECKING:
    from paceline.inference.exports.core.comparison import ProofRecord


class ExportOutput(TypedDict, total=False):
    """The output with ``--json``: of an export, and of an upload."""

    path: str
    format: str
    bytes: int
    check: ProofRecord
    repository: str
    url: str


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "run_dir",
        AnyPath("its output_dir, one of its checkpoints, or a folder of transformers or peft"),
        "RUN",
        "run",
    )
    parser.add_flag("--merge", "merge the adapter into the weights of the base model")
    parser.add_flag("--adapter", "check that vLLM and peft load the adapter, and copy it")
    parser.add_option(
        "--gguf",
        Choice(KINDS),
        "TYPE",
        "write a GGUF file for llama.cpp, with weights of TYPE",
    )
    parser.add_flag(
        "--ollama",
        "write a GGUF file (default: q8_0) and a Modelfile for Ollama",
    )
    parser.add_option(
        "--quantize",
        Choice(SCHEMES),
        "SCHEME",
        "quantize the weights: fp8 and w4a16 in the format compressed-tensors",
    )
    parser.add_option(
        "--output",
        AnyText("a folder that does not exist yet"),
        "DIR",
        "folder to write to (default: RUN/exported, or RUN/FORM, such as RUN/gguf-q8_0)",
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
        Number("a number from 0 on", (0.0, math.inf)),
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
    from paceline.inference.exports.registry import FormOptions, choose_form
    from paceline.inference.exports.source import is_checkpoint
    from paceline.launch.after_training.hub_upload import check_repository

    if args.private and args.push is None:
        raise ConfigError(
            "`--private` is not supported without `--push`",
            code="private-without-push",
            fix="omit it",
        )
    options = FormOptions(
        args.merge, args.adapter, args.gguf, args.quantize, args.ollama, args.dtype
    )
    result = ExportOutput()
    exported = None
    with contextlib.redirect_stdout(sys.stderr):
        if args.push is not None:
            check_repository(args.push, f"`--push {args.push}`")
        is_written = options.chosen or args.output is not None or is_checkpoint(args.run_dir)
        if args.push is None or is_written:
            exported = export(
                args.run_dir,
                choose_form(options),
                output=args.output,
                allow_missing=args.allow_missing,
                limit=args.limit,
            )
            result = ExportOutput(
                path=str(exported.path),
                format=exported.form,
                bytes=exported.size_bytes,
                check=exported.check.record(),
            )
        if args.push is not None:
            folder = None if exported is None else exported.path
            repository, url = push(args.run_dir, args.push, folder, args.private or None)
            result["repository"], result["url"] = repository, url
    if args.json:
        print(json.dumps(result))
        return EXIT_DONE
    if exported is not None:
        print(f"wrote {exported.path}")
        print(f"checked: {exported.check.text()}")
    if args.push is not None:
        print(f"uploaded to {result['repository']}: {result['url']}")
    return EXIT_DONE

"""`paceline inspect`: show the tensors and the digest of a checkpoint."""

import contextlib
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from paceline.commands.options import AnyText, OptionParser
from paceline.core.errors import EXIT_DONE
from paceline.core.formatting import counted


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "checkpoint",
        AnyText("a checkpoint, the folder of a run, or a URL"),
        "CHECKPOINT",
        "checkpoint",
    )
    parser.add_flag("--digest", "print only the digests of the checkpoint and of its weights")
    parser.example = "paceline inspect output/demo"


def run(args: Namespace) -> int:
    """Print step, digest and tensors of the checkpoint."""
    from paceline.checkpoint import store
    from paceline.checkpoint.remote import fetch_checkpoint
    from paceline.checkpoint.urls import is_url

    url = args.checkpoint if is_url(args.checkpoint) else None
    with tempfile.TemporaryDirectory() if url else contextlib.nullcontext() as folder:
        path = (
            fetch_checkpoint(url, Path(folder), _warn, "CHECKPOINT")
            if url and folder
            else store.find(Path(args.checkpoint), _warn)
        )
        contents = store.inspect(path)
    if args.json:
        digests = {"digest": contents["digest"], "model_digest": contents["model_digest"]}
        print(json.dumps(digests if args.digest else contents, indent=2))
        return EXIT_DONE
    if not args.digest:
        ranks = counted(contents["world_size"], "rank")
        print(
            f"{url or path}\nstep {contents['step']}, written by {contents['strategy']} on {ranks}"
        )
    print(f"digest        {contents['digest']}\nmodel_digest  {contents['model_digest']}")
    for name, tensor in ({} if args.digest else contents["tensors"]).items():
        print(f"  {tensor['sha256'][:12]}  {tensor['dtype']:<5} {tensor['shape']!s:<16} {name}")
    return EXIT_DONE


def _warn(text: str) -> None:
    print(f"warning: skipping a checkpoint: {text}", file=sys.stderr)

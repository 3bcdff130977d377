"""Record the trained model's answers, and compare an export to them in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import RunError
from paceline.core.processes import end_with_parent, exit_text
from paceline.inference.exports.core.answers import answer_prompts, save_answers
from paceline.inference.exports.core.comparison import ProofCheck
from paceline.inference.exports.core.forms import ExportForm, ProofLimit
from paceline.inference.exports.core.prompts import proof_prompts
from paceline.inference.exports.core.transformers_engine import TransformersProofEngine
from paceline.models.blocks import base_model
from paceline.models.positions import position_limit

_MODULE = "paceline.inference.exports"


@dataclass(frozen=True)
class TrainedAnswers:
    """The trained model's answers.

    Args:
        file: file that stores them.
        num_prompts: number of prompts.
    """

    file: Path
    num_prompts: int


def record_answers(model: Any, tokenizer: Any, file: Path) -> TrainedAnswers:
    """Run the prompts through the trained model, and store its answers in ``file``."""
    prompts = proof_prompts(tokenizer)
    limit = position_limit(base_model(model).config.to_dict())
    engine = TransformersProofEngine(model, tokenizer)
    answers = answer_prompts(engine, prompts, None if limit is None else limit.tokens)
    save_answers(file, prompts, answers, str(model.dtype).removeprefix("torch."))
    return TrainedAnswers(file, len(prompts))


def prove(
    form: ExportForm,
    folder: Path,
    answers: TrainedAnswers,
    limit: ProofLimit,
    trusts_code: bool = False,
) -> ProofCheck:
    """Load the export in ``folder`` in a new process, and compare it to the trained model.

    Args:
        trusts_code: whether code in the folder may run.

    Raises:
        RunError: it cannot be loaded, or it differs by more than ``limit``.
    """
    reason = form.unreadable()
    if reason is not None:
        return ProofCheck(None, answers.num_prompts, limit, reason)
    result = answers.file.with_name("proof.json")
    arguments = [form.name, str(folder), str(answers.file), str(result)]
    output = _run([*arguments, *(["trust"] if trusts_code else [])])
    if not result.is_file():
        raise RunError(
            "the exported model cannot be loaded or run: {reason}",
            code="export-not-loaded",
            fix="report this with the config of the run; nothing was written",
            reason=output,
        )
    check = ProofCheck(json.loads(result.read_text()), answers.num_prompts, limit)
    if not check.is_ok:
        raise RunError(
            "the exported model is not equal to the trained model: {result}",
            code="export-not-equal",
            fix="export it in another form, or accept a larger difference with `--limit X`;"
            " nothing was written",
            result=check.text(),
        )
    return check


def _run(arguments: list[str]) -> str:
    """Run the process. Return the last line that it printed."""
    end: Callable[[], None] = end_with_parent
    process = subprocess.run(
        [sys.executable, "-m", _MODULE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=end,
        check=False,
    )
    lines = process.stdout.decode(errors="replace").strip().splitlines()
    if process.returncode < 0:
        return f"the process {exit_text(process.returncode)}"
    return lines[-1] if lines else f"the process ended with exit code {process.returncode}"

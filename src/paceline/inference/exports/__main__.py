"""The process that loads an export and compares it to the trained model: ``python -m
paceline.inference.exports FORM FOLDER ANSWERS RESULT [trust]``.

Args:
    FORM: name of the form of the export.
    FOLDER: folder of the export.
    ANSWERS: file with the trained model's answers.
    RESULT: file to which the figures are written, as JSON.
    trust: code in the folder may run.
"""

import sys
from pathlib import Path

from paceline.core.files import write_json_atomic
from paceline.inference.exports.core.answers import answers_dtype, load_answers
from paceline.inference.exports.core.comparison import compare
from paceline.inference.exports.full import FullForm
from paceline.inference.exports.registry import form_named


def main(form: str, folder: str, answers: str, result: str, trust: str = "") -> None:
    prompts, expected = load_answers(Path(answers))
    exported = form_named(form)
    if isinstance(exported, FullForm):
        exported.proof_dtype = answers_dtype(Path(answers))
    engine = exported.open(Path(folder), bool(trust))
    write_json_atomic(Path(result), compare(engine, prompts, expected))


if __name__ == "__main__":
    main(*sys.argv[1:])

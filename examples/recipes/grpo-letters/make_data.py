"""Write the data of this recipe: prompts of three letters such as "e d j". The right answer is the
place of the last letter in the alphabet, from 0 for "a" to 9 for "j".

`python make_data.py FOLDER --seed 0` writes

- `warm-up.jsonl`: prompts with answers that are mostly wrong. One in eight is right, the others are
  too large by 1 or 2 (modulo 10). So the model learns to answer with a digit that depends on the
  letter, and rarely with the right one.
- `train.jsonl`: prompts with the right answers, which only the reward sees.
- `permuted.jsonl`: the same, with the answers shuffled among the prompts.
- `held-out.jsonl`: prompts that are in none of the other files.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

LETTERS = "abcdefghij"
NUM_HELD_OUT = 200
#: How often a warm-up answer is the right one, 1 more, and 2 more (modulo 10).
OFFSET_WEIGHTS = (1 / 8, 7 / 16, 7 / 16)
ROWS_PER_PROMPT = 10


def write_data(folder: Path, seed: int = 0) -> None:
    """Write the files."""
    draws = random.Random(seed)
    prompts = [" ".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    draws.shuffle(prompts)
    held_out, train = prompts[:NUM_HELD_OUT], prompts[NUM_HELD_OUT:]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "held-out.jsonl", "answer", ((each, answer_of(each)) for each in held_out))
    _write(folder / "train.jsonl", "answer", ((each, answer_of(each)) for each in train))
    answers = [answer_of(each) for each in train]
    draws.shuffle(answers)
    _write(folder / "permuted.jsonl", "answer", zip(train, answers, strict=True))
    repeated = train * ROWS_PER_PROMPT
    offsets = draws.choices(range(3), OFFSET_WEIGHTS, k=len(repeated))
    pairs = zip(repeated, offsets, strict=True)
    _write(
        folder / "warm-up.jsonl",
        "completion",
        ((each, (answer_of(each) + offset) % len(LETTERS)) for each, offset in pairs),
    )


def answer_of(prompt: str) -> int:
    """Return the right answer."""
    return LETTERS.index(prompt[-1])


def _write(path: Path, column: str, rows: Iterable[tuple[str, int]]) -> None:
    lines = [json.dumps({"prompt": prompt, column: str(answer)}) for prompt, answer in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write the files into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_data(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()

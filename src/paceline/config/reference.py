"""Writes the generated pages of ``docs/``: config.md, config.schema.json and
keys-of-other-tools.md.

``python -m paceline.config.reference`` writes them, ``--check`` exits with 1 where they are stale.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from paceline.config.compat.keys import TOOLS, alias_tables, ignored_tables
from paceline.config.compat.methods import method_tables
from paceline.config.entries import short
from paceline.config.fields import KEYS, SECTIONS, describe
from paceline.config.schema import Config
from paceline.config.schema.data import DatasetSource

_INTRO = """# The config

Generated from the schema by `python -m paceline.config.reference`; do not edit by hand.

A run is one YAML file. Only `model` and `dataset` must be given:

```yaml
# yaml-language-server: $schema=docs/config.schema.json
model: Qwen/Qwen2.5-0.5B
dataset: ./questions.jsonl
lora: {enable: true, rank: 16}
train_args:
  learning_rate: 1e-4
  num_train_epochs: 1
```

**Completion in an editor.** Editors with the YAML language server (VS Code's YAML extension,
Neovim, Helix, ...) complete and check keys as you type where the file's first line names the
schema, as above: a path from the file's own folder, or a URL.

**Precedence.** Defaults < file < command line. On the command line a key is `key=value`, `--key
value` or `--key=value`, dotted for nested keys (`lora.rank=16`, `--lora.rank 16`), and `--flag`
alone means true. Values are YAML: `[a, b]`, `{min_lr: 1e-6}`, `null`. An override changes the one
key that it names; a list is replaced as a whole; `key=null` goes back to the default. Environment
variables never change a value.

**Mistakes.** An unknown key is an error that names its line and the nearest key; all mistakes in a
file are reported at once. Keys of `train_args` may also be given at the top level.
"""

_BY_TOOL = """# Keys of other tools, by tool

Generated from the tables by `python -m paceline.config.reference`; do not edit by hand. How to use
the files of these tools: [coming from other tools](how-to/other-tools.md). The same keys by what
becomes of them: [the config](config.md#keys-of-other-tools).

- A key of Paceline in the second column: it is read as that key.
- `by value`: it sets nothing; what is reported depends on the value.
- `warning`: it changes what is learned or how much memory is used, and has no effect here. The
  reason states what happens instead.
- `info`: it has no effect here, and changes neither.
- `refused`: it belongs to a training method that Paceline does not have.

Keys of transformers' TrainingArguments that have the same name in Paceline (`learning_rate`,
`max_steps`, …) are not listed.
"""

_OTHER = """## Keys of other tools

Keys of ms-swift, LLaMA-Factory, axolotl and TRL (with transformers' TrainingArguments) load at the
top level, under `train_args`, or in the section they belong to; on the command line too. Each
mapping is printed once, and so is each key that means nothing here: as a warning where it would
have changed what is trained. Two spellings of one key that disagree are an error. What such a
config leaves out has Paceline's defaults, not the other tool's.

`path#N`, `id:subset#N` and lists in `dataset` are read as ms-swift writes them; `dataset: a,b` as
LLaMA-Factory does; `datasets: [{path, type, ...}]` as axolotl does.
"""


def markdown() -> str:
    """The text of docs/config.md."""
    parts = [_INTRO, _section("Top level", "", [key for key in KEYS if "." not in key])]
    for name, kind in SECTIONS.items():
        keys = [key for key in KEYS if key.startswith(f"{name}.")]
        parts.append(_section(f"`{name}`", (kind.__doc__ or "").split("\n")[0], keys))
    parts.append(_source_section())
    parts.append(_OTHER)
    parts.append(_mapped())
    parts.append(_values())
    parts.append(_ignored())
    parts.append(_refused())
    return "\n".join(parts)


def schema_json() -> str:
    """The text of docs/config.schema.json (JSON Schema, draft 2020-12)."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
    }
    schema["title"] = "Paceline config"
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(_cell(one) for one in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _default(info: Any) -> str:
    if info.is_required():
        return "must be given"
    value = info.get_default(call_default_factory=True)
    return "must be given" if value is PydanticUndefined else f"`{short(value)}`"


def _rows(fields: dict[str, Any]) -> list[list[str]]:
    return [
        [f"`{name}`", describe(info), _default(info), info.description or ""]
        for name, info in fields.items()
    ]


def _section(title: str, words: str, keys: list[str]) -> str:
    rows = _rows({key: KEYS[key] for key in keys})
    return (
        f"## {title}\n\n"
        + (f"{words}\n\n" if words else "")
        + _table(["key", "takes", "default", "meaning"], rows)
    )


def _source_section() -> str:
    rows = _rows(dict(DatasetSource.model_fields))
    return (
        "## A source of samples\n\nWhere a path or hub id does not say enough, `dataset` and"
        " `val_dataset` take a mapping, or a list of them.\n\n"
        + _table(["key", "takes", "default", "meaning"], rows)
    )


def _tools(letters: str) -> str:
    return ", ".join(TOOLS[letter] for letter in letters)


def _mapped() -> str:
    rows = [
        [f"`{key}`", _tools(one.tools), f"`{one.target}`", one.meaning]
        for key, one in alias_tables().aliases.items()
        if one.target
    ]
    rows += [
        [f"`{key}`", _tools(one.tools), f"`{one.target}`", one.meaning]
        for key, one in alias_tables().sections.items()
    ]
    return "### Read as a key of Paceline\n\n" + _table(
        ["key", "of", "read as", "how"], sorted(rows)
    )


def _values() -> str:
    shared = alias_tables().shared | alias_tables().shared_if_foreign
    rows = [[f"`{key}`", _tools(one.tools)] for key, one in shared.items()]
    words = (
        "These keys have the same name here; values that only other tools know are converted, or"
        " refused with the reason."
    )
    return f"### Shared names\n\n{words}\n\n" + _table(["key", "values of"], sorted(rows))


def _ignored() -> str:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for key, one in ignored_tables().keys.items():
        by_reason.setdefault((one.level, one.reason), []).append(key)
    for prefix, one in ignored_tables().prefixes.items():
        by_reason.setdefault((one.level, one.reason), []).append(f"{prefix}*")
    for key, alias in alias_tables().aliases.items():
        if not alias.target:
            by_reason.setdefault(("by value", alias.meaning), []).append(key)
    rows = [
        [", ".join(f"`{key}`" for key in sorted(keys)), level, reason]
        for (level, reason), keys in by_reason.items()
    ]
    return "### Named as ignored\n\n" + _table(["keys", "level", "why"], rows)


def _refused() -> str:
    by_methods: dict[tuple[str, ...], list[str]] = {}
    for key, (_, methods) in method_tables().keys.items():
        by_methods.setdefault(methods, []).append(key)
    rows = [
        [", ".join(f"`{key}`" for key in sorted(keys)), ", ".join(methods)]
        for methods, keys in by_methods.items()
    ]
    words = (
        "Paceline does not have these training methods. A config that names one (`stage: dpo`, `rl:"
        " kto`, `rlhf_type: grpo`, `reward_model: true`), or that has a key that only their"
        " trainers read, is refused with exit code 2. In a config that names its task (`task: sft`,"
        " `stage: sft`), such a key is a warning."
    )
    listed = "\n".join(f"- `{name}`: {text}" for name, text in method_tables().methods.items())
    return f"### Refused: other training methods\n\n{words}\n\n{listed}\n\n" + _table(
        ["keys", "read by trainers of"], rows
    )


def by_tool() -> str:
    """The text of docs/keys-of-other-tools.md: every key of each tool, and what becomes of it."""
    parts = [_BY_TOOL]
    for letter, tool in TOOLS.items():
        rows = {}
        for key, alias in alias_tables().aliases.items():
            if letter in alias.tools:
                target = f"`{alias.target}`" if alias.target else "by value"
                rows[key] = [f"`{key}`", target, alias.meaning]
        for key, ignored in ignored_tables().keys.items():
            if letter in ignored.tools:
                rows[key] = [f"`{key}`", ignored.level, ignored.reason]
        for key, (tools, methods) in method_tables().keys.items():
            if letter in tools:
                rows[key] = [f"`{key}`", "refused", f"a setting of {', '.join(methods)}"]
        parts.append(
            f"## {tool}\n\n"
            + _table(["key", "becomes", "how, or why"], [rows[key] for key in sorted(rows)])
        )
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` say which are stale. Returns the exit code."""
    folder = Path(__file__).resolve().parents[3] / "docs"
    texts = {
        folder / "config.md": markdown(),
        folder / "config.schema.json": schema_json(),
        folder / "keys-of-other-tools.md": by_tool(),
    }
    if "--check" in arguments:
        stale = [
            path.name
            for path, text in texts.items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            print(
                f"stale: {', '.join(stale)}; run python -m paceline.config.reference",
                file=sys.stderr,
            )
        return 1 if stale else 0
    folder.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The form of an export that Ollama reads: a GGUF file and a Modelfile."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.data.text.qwen_tokenizer import folder_template
from paceline.inference.exports.core.forms import ExportSource
from paceline.inference.exports.gguf.gguf_form import GgufForm, gguf_file
from paceline.inference.exports.gguf.tokenizer import GgufTokenizer, read_tokenizer
from paceline.inference.exports.ollama.go_template import (
    GoTemplate,
    go_template,
    template_name,
)
from paceline.inference.exports.source import tokenizer_folder

MODELFILE = "Modelfile"
_ALLOWED = (
    "models trained with one of the named templates of `chat_template`, such as chatml, or with a"
    " built-in model's own"
)


class OllamaForm(GgufForm):
    """A GGUF file with a Modelfile.

    Args:
        kind: one of ``tensor_types.KINDS``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.name = f"ollama-{kind}"
        self.option = "`--ollama`"

    def check(self, source: ExportSource) -> None:
        super().check(source)
        template_of(tokenizer_folder(source))

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        template = template_of(model)
        super().write(source, model, folder)
        text = modelfile(gguf_file(folder).name, template)
        (folder / MODELFILE).write_text(text, encoding="utf-8")


def template_of(folder: Path) -> GoTemplate:
    """Return the chat template of a model's folder in Go's language.

    Raises:
        ConfigError: the folder has no template, or another one than those that are translated.
    """
    source = folder_template(folder)
    if source is None:
        raise ConfigError(
            "the model has no chat template, which Ollama needs",
            code="ollama-no-template",
            allowed=_ALLOWED,
            fix="export the model with `--gguf` instead of `--ollama`",
        )
    name = template_name(source)
    if name is None:
        raise ConfigError(
            "the chat template of the model is not available for Ollama: Ollama's TEMPLATE is in"
            " the language of Go's text/template, not in Jinja",
            code="ollama-template",
            allowed=_ALLOWED,
            fix="export the model with `--gguf` instead of `--ollama`: llama.cpp reads the template"
            " in the file",
        )
    tokenizer = read_tokenizer(folder)
    return go_template(name, _text(tokenizer, "bos"), _text(tokenizer, "eos"), tokenizer.adds_start)


def _text(tokenizer: GgufTokenizer, name: str) -> str:
    number = tokenizer.special.get(name)
    return "" if number is None else tokenizer.tokens[number]


def modelfile(file: str, template: GoTemplate) -> str:
    """Return the text of a Modelfile.

    Args:
        file: name of the GGUF file next to it.
    """
    lines = [f"FROM ./{file}", f'TEMPLATE """{template.source}"""']
    if template.system:
        lines.append(f'SYSTEM """{template.system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in template.stops]
    return "\n".join(lines) + "\n"

"""Tiny models and adapters, and servers of `paceline serve` for tests."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_families import make_family
from commands import start
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer

#: A template that reads arguments, tools and reasoning, as Qwen 3.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} <tool_call><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if style is defined %}({{ style }}) {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def write_base(folder: Path, seed: int = 0, end_ids: list[int] | None = None) -> Path:
    """Write a tiny model with random weights, which are large enough for answers that vary."""
    torch.manual_seed(seed)
    make_family("qwen2", folder, max_position_embeddings=8192)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4).add_(0.1 * seed * torch.randn_like(parameter))
    model.save_pretrained(folder)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    return folder


def write_adapter(run: Path, base: Path, seed: int, **settings: Any) -> Path:
    """Write a run whose model is an adapter with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    chosen = {"target_modules": ["q_proj", "v_proj"], **settings}
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **chosen))
    adapted.save_pretrained(str(run / "model"), save_embedding_layers=False)
    copy_tokenizer(base, run / "model")
    (run / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return run


@dataclass
class ServedApi:
    """A running server.

    Args:
        start: what it printed at the start.
        process: its process.
    """

    start: dict[str, Any]
    process: Any

    @property
    def port(self) -> int:
        return int(self.start["url"].rpartition(":")[2])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.start['token']}"}

    def client(self, **settings: Any) -> OpenAI:
        """Return a client that does not repeat refused requests."""
        url = f"{self.start['url']}/v1"
        token = self.start["token"] or "none"
        return OpenAI(base_url=url, api_key=token, **{"max_retries": 0, **settings})


@contextlib.contextmanager
def serve_api(
    run: Path, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[ServedApi]:
    """Serve a run until the end of the block."""
    environment = {**os.environ, **(variables or {})}
    with start(
        str(run), "--json", "--port", "0", *options, verb="serve", env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield ServedApi(json.loads(line), process)
        finally:
            if process.poll() is None:
                process.kill()


def train_answer(folder: Path, answer: str, num_steps: int = 200, **chat: Any) -> Path:
    """Write a tiny model that gives one answer to a chat.

    Args:
        chat: arguments of the chat template, with the messages as `conversation`.
    """
    write_base(folder, end_ids=[2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(tokenize=False, add_generation_prompt=True, **chat)
    start = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    text = f"{prompt}{answer}<|im_end|>"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    labels = ids.clone()
    labels[:, : start.shape[1]] = -100
    torch.manual_seed(0)
    make_family("qwen2", folder / "new", hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "new").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = [2]
    model.save_pretrained(folder)
    return folder

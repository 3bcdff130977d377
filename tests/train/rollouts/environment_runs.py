"""Runs whose completions call the tools of an environment, with a model that has learned to write
calls."""

import json
from pathlib import Path
from typing import Any

import torch
from rollout_runs import train_on_rollouts
from transformers import AutoModelForCausalLM

from paceline.data.text.chat_template import ChatTemplate
from paceline.data.text.chats.environment_tools import environment_tools
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import resolve_model

NUM_PROMPTS = 8
GAME = '''
"""A game: guess a digit."""

class Game:
    def reset(self, secret, **columns):
        self.secret, self.guesses = int(secret), []

    def guess(self, number: int) -> str:
        """Guess the digit.

        Args:
            number: the digit
        """
        self.guesses.append(number)
        if number == self.secret:
            return "right"
        return "low" if number < self.secret else "high"

    def get_reward(self):
        return float(self.secret in self.guesses)


def near(environments, completions, **columns):
    return [
        -abs(each.guesses[-1] - each.secret) / 10 if each.guesses else -1.0
        for each in environments
    ]
'''
QUESTION: ChatMessage = {"role": "user", "content": "Play."}


def write_game(folder: Path, source: str = GAME) -> None:
    """Write the environment, the rewards and the prompts of a run."""
    rows = [{"prompt": [QUESTION], "secret": number} for number in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "game.py").write_text(source)


def teach_calls(folder: Path) -> Path:
    """Train the smallest built-in model to guess digits; return its folder."""
    write_game(folder)
    base = Path(resolve_model("builtin:qwen2-micro"))
    tokenizer = load_tokenizer(base)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    tools = list(environment_tools(f"{folder / 'game.py'}:Game"))
    chats = [_chat(first, second) for first in (2, 6) for second in (0, 4)]
    texts = [template.render(chat, tools=tools) for chat in chats]
    rows = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    start = len(
        tokenizer.encode_batch(
            [template.render([QUESTION], add_generation_prompt=True, tools=tools)], False
        )[0]
    )
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        labels[number, start : len(row)] = ids[number, start : len(row)]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    target = folder / "model"
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((base / name).read_bytes())
    return target


def _chat(first: int, second: int) -> list[ChatMessage]:
    def guess(number: int) -> ChatMessage:
        function: Any = {"name": "guess", "arguments": {"number": number}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }

    return [
        QUESTION,
        guess(first),
        {"role": "tool", "content": "low" if second > first else "high"},
        guess(second),
        {"role": "tool", "content": "right"},
        {"role": "assistant", "content": "done"},
    ]


def play(folder: Path, model: Path, name: str, *args: str, expect: int = 0) -> Any:
    """Run `paceline sft` with the game. ``args`` replace defaults with the same key."""
    defaults = (
        f"model={model}",
        f"rewards=[{{name: environment}}, {{function: '{folder / 'game.py'}:near'}}]",
        f"grpo.environment={folder / 'game.py'}:Game",
        "grpo.max_completion_length=100",
        "max_length=320",
        "grpo.reward_workers=1",
    )
    keys = {each.partition("=")[0] for each in args}
    kept = [each for each in defaults if each.partition("=")[0] not in keys]
    return train_on_rollouts(folder, name, *kept, *args, expect=expect)

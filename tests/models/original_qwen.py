"""A tiny checkpoint in the format of the first-generation Qwen models, and an independent reference
implementation.

The forward pass and the tokenizer follow modeling_qwen.py and tokenization_qwen.py of
https://huggingface.co/Qwen/Qwen-7B and share no code with Paceline.
"""

import base64
import json
import math
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN, LAYERS, HEADS, INNER, SEQ_LENGTH = 64, 2, 4, 96, 256
TOKEN_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(205)),
]


def write_checkpoint(folder: Path, text: str, num_shards: int = 2, **changes: Any) -> Path:
    """Write a checkpoint with random weights and a tokenizer trained on ``text``."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = train_ranks(text, 600)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "qwen.tiktoken").write_text("\n".join(lines) + "\n")
    vocabulary = len(ranks) + len(SPECIAL) + 12
    config = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "intermediate_size": 2 * INNER,
        "vocab_size": vocabulary,
        "seq_length": SEQ_LENGTH,
        "max_position_embeddings": 4 * SEQ_LENGTH,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "layer_norm_epsilon": 1e-6,
        "no_bias": True,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "initializer_range": 0.02,
        "attn_dropout_prob": 0.0,
        "emb_dropout_prob": 0.0,
        "bf16": False,
        "fp16": False,
        "scale_attn_weights": True,
        "auto_map": {
            "AutoConfig": "configuration_qwen.QWenConfig",
            "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
        },
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"chat_format": "chatml", "max_new_tokens": 16, "top_p": 0.8})
    )
    weights = random_weights(vocabulary)
    names = list(weights)
    for number in range(num_shards):
        shard = {name: weights[name] for name in names[number::num_shards]}
        save_file(
            shard,
            folder / f"model-{number + 1:05}-of-{num_shards:05}.safetensors",
            metadata={"format": "pt"},
        )
    return folder


def random_weights(vocabulary: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, scale: float = 0.1) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    weights = {"transformer.wte.weight": draw(vocabulary, HIDDEN, scale=0.5)}
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}."
        weights |= {
            f"{prefix}ln_1.weight": 1 + draw(HIDDEN),
            f"{prefix}attn.c_attn.weight": draw(3 * HIDDEN, HIDDEN),
            f"{prefix}attn.c_attn.bias": draw(3 * HIDDEN),
            f"{prefix}attn.c_proj.weight": draw(HIDDEN, HIDDEN),
            f"{prefix}attn.rotary_emb.inv_freq": draw(HIDDEN // HEADS // 2),
            f"{prefix}ln_2.weight": 1 + draw(HIDDEN),
            f"{prefix}mlp.w1.weight": draw(INNER, HIDDEN),
            f"{prefix}mlp.w2.weight": draw(INNER, HIDDEN),
            f"{prefix}mlp.c_proj.weight": draw(HIDDEN, INNER),
        }
    return weights | {
        "transformer.ln_f.weight": 1 + draw(HIDDEN),
        "lm_head.weight": draw(vocabulary, HIDDEN),
    }


def reference_logits(folder: Path, ids: Tensor) -> Tensor:
    """Return the logits [tokens, vocabulary] of one sample in evaluation mode, with dynamic NTK
    scaling and log-n attention if the config enables them."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    config = json.loads((folder / "config.json").read_text())
    count, size = len(ids), HIDDEN // HEADS
    length = config["seq_length"]
    alpha = (
        max(1.0, 2 ** math.ceil(math.log2(count / length) + 1) - 1)
        if config["use_dynamic_ntk"]
        else 1.0
    )
    base = config["rotary_emb_base"] * alpha ** (size / (size - 2))
    angles = torch.outer(
        torch.arange(count).float(), 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    )
    cosine, sine = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["layer_norm_epsilon"]) * weight
        )

    def rotate(x: Tensor) -> Tensor:  # [tokens, heads, size]
        left, right = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-right, left], dim=-1) * sine

    x = weights["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}."
        normalized = norm(x, weights[f"{prefix}ln_1.weight"])
        projected = (
            normalized @ weights[f"{prefix}attn.c_attn.weight"].T
            + weights[f"{prefix}attn.c_attn.bias"]
        )
        query, key, value = (
            part.view(count, HEADS, size) for part in projected.split(HIDDEN, dim=-1)
        )
        query, key = rotate(query), rotate(key)
        if config["use_logn_attn"]:
            scales = [
                math.log(position, length) if position > length else 1.0
                for position in range(1, count + 1)
            ]
            query = query * torch.tensor(scales)[:, None, None]
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, HIDDEN)
        x = x + attended @ weights[f"{prefix}attn.c_proj.weight"].T
        normalized = norm(x, weights[f"{prefix}ln_2.weight"])
        gated = (normalized @ weights[f"{prefix}mlp.w1.weight"].T) * functional.silu(
            normalized @ weights[f"{prefix}mlp.w2.weight"].T
        )
        x = x + gated @ weights[f"{prefix}mlp.c_proj.weight"].T
    return norm(x, weights["transformer.ln_f.weight"]) @ weights["lm_head.weight"].T


# -- tokenizer
def train_ranks(text: str, num_merges: int) -> dict[bytes, int]:
    """Return byte-pair ranks: the single bytes, then the most frequent pairs in ``text``."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokens = [
        [bytes([byte]) for byte in token.encode()] for token in regex.findall(TOKEN_PATTERN, text)
    ]
    for _ in range(num_merges):
        counts: dict[tuple[bytes, bytes], int] = {}
        for token in tokens:
            for pair in pairwise(token):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        pair = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.setdefault(pair[0] + pair[1], len(ranks))
        tokens = [merge_pair(token, pair) for token in tokens]
    return ranks


def merge_pair(token: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    result: list[bytes] = []
    for part in token:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def reference_tokens(folder: Path, text: str) -> list[int]:
    """Return the ids of a text as tiktoken computes them: split at special tokens, then repeatedly
    merge the pair with the lowest rank in each word."""
    lines = (folder / "qwen.tiktoken").read_text().split("\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    special = {token: len(ranks) + number for number, token in enumerate(SPECIAL)}
    ids: list[int] = []
    for part in regex.split(
        "(" + "|".join(map(regex.escape, SPECIAL)) + ")", unicodedata.normalize("NFC", text)
    ):
        if part in special:
            ids.append(special[part])
            continue
        for token in regex.findall(TOKEN_PATTERN, part):
            pieces = [bytes([byte]) for byte in token.encode()]
            while True:
                pairs = [
                    (ranks.get(a + b, math.inf), index)
                    for index, (a, b) in enumerate(pairwise(pieces))
                ]
                rank, index = min(pairs, default=(math.inf, 0))
                if rank == math.inf:
                    break
                pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
            ids += [ranks[piece] for piece in pieces]
    return ids

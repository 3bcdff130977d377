"""Small tokenizers of the kinds that published models have, trained on a few sentences."""

import json
from pathlib import Path
from typing import Any

SENTENCES = [
    "What is the sum of 12 and 30? It is 42.", "Is 7 > 0? Yes, it is 7.", "good day, hello world",
    "the answer is bad; the answer is good", "One line\nand another line\n  with spaces",
] * 20  # fmt: skip
SPECIAL = [
    "<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|start|>", "<|call|>", "<|assistant|>",
    "<|tool|>",
]  # fmt: skip
#: Kinds that write a space before a text: of Llama 2, of its later files, and of T5 and XLNet.
SENTENCE_PIECE_KINDS = ("prepend", "metaspace", "first", "unigram")
KINDS = (*SENTENCE_PIECE_KINDS, "bytes")


def make_tokenizer(folder: Path, kind: str, *, bos: bool = True, eos: bool = False) -> Path:
    """Save a tokenizer of one of :data:`KINDS`, without a chat template.

    Args:
        bos, eos: whether the tokenizer adds ``<s>`` before a text and ``</s>`` after it.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    model: Any = models.BPE(unk_token="<unk>", byte_fallback=kind != "bytes")
    if kind == "unigram":
        model = models.Unigram()
    backend = Tokenizer(model)
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        scheme = "first" if kind == "first" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if kind != "bytes":
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    fallback = [f"<0x{number:02X}>" for number in range(256)]
    letters = sorted({letter for sentence in SENTENCES for letter in sentence} - {"\n", " "})
    if kind == "unigram":
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=[*SPECIAL, "\n"],
            unk_token="<unk>",
            initial_alphabet=[*letters, "▁"],
            show_progress=False,
        )
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [*letters, "▁"]
        trainer = trainers.BpeTrainer(
            vocab_size=480,
            special_tokens=[*SPECIAL, *([] if kind == "bytes" else fallback)],
            initial_alphabet=alphabet,
            max_token_length=8,
            show_progress=False,
        )
    if kind == "prepend":  # as Llama's, whose merges do not cross words
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(SENTENCES, trainer)
    if kind == "prepend":
        backend.pre_tokenizer = None
    single = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.save_pretrained(folder)
    return folder


_CODE = '''
"""Words with the space before them, letter by letter for unknown ones."""

import re

from transformers import PreTrainedTokenizer


class SpacedTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "vocab.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file=None, **options):
        import json

        with open(vocab_file, encoding="utf-8") as file:
            self.numbers = json.load(file)
        self.names = {number: name for name, number in self.numbers.items()}
        self.vocab_file = vocab_file
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.numbers)

    def get_vocab(self):
        return dict(self.numbers)

    def _tokenize(self, text):
        words = re.findall(r"▁?[^▁]+|▁", ("▁" + text).replace(" ", "▁"))
        return [
            token
            for word in words
            for token in ([word] if word in self.numbers else list(word))
        ]

    def _convert_token_to_id(self, token):
        return self.numbers.get(token, 0)

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("▁", " ")

    def build_inputs_with_special_tokens(self, first, second=None):
        return [self.numbers["<s>"], *first]

    def save_vocabulary(self, folder, filename_prefix=None):
        import shutil
        from pathlib import Path

        target = Path(folder) / "vocab.json"
        if Path(self.vocab_file) != target:
            shutil.copy(self.vocab_file, target)
        return (str(target),)
'''


def make_python_tokenizer(folder: Path) -> Path:
    """Save a tokenizer that is written in Python, has no offsets and writes a space before a
    text."""
    folder.mkdir()
    spaced = {f"▁{part}" for sentence in SENTENCES for part in sentence.split()}
    letters = {letter for sentence in SENTENCES for letter in sentence} | {"▁", "[", "]"}
    names = [*SPECIAL, *sorted(spaced), *sorted(letters - spaced)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    (folder / "vocab.json").write_text(json.dumps(numbers), encoding="utf-8")
    (folder / "tokenization_spaced.py").write_text(_CODE, encoding="utf-8")
    settings = {
        "tokenizer_class": "SpacedTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_spaced.SpacedTokenizer", None]},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "additional_special_tokens": SPECIAL[3:],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

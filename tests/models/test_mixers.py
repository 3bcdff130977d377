"""In packed rows, recurrent and convolution layers compute each sample as in a row of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import PACKED_HYBRIDS, build_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.schema import Config
from paceline.data.collate import collate_packed, collate_padded
from paceline.distributed import torch_compat
from paceline.models import attention
from paceline.models.adapters.lora import add_adapters
from paceline.models.blocks import base_model
from paceline.models.checks.packing import choose_packing
from paceline.models.kernels import mixers
from paceline.models.transforms.activation_checkpointing import checkpoint_activations

#: Samples of equal lengths, shorter than the convolutions of all families (4 tokens, of LFM2 3),
#: and longer than what their layers compute at once (16 tokens, or 64).
LENGTHS = (9, 2, 1, 70, 9, 5, 2)
CONFIG = Config(model="m", dataset="d")
CPU = torch.device("cpu")


def make_samples():
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(3, 8192, (length,), generator=generator).numpy(),
            "labels_mask": torch.ones(length, dtype=torch.bool).numpy(),
        }
        for length in LENGTHS
    ]


def make_inputs(batch):
    names = ("input_ids", "position_ids", "attention_mask", "segment_lengths", "cu_seqlens")
    inputs = {name: batch[name] for name in (*names, "max_seqlen") if name in batch}
    return {**inputs, "use_cache": False}


def gradients_of(model, batch):
    """Return the gradients of the summed loss; backward runs in another thread, as on a GPU."""
    model.zero_grad()
    logits = model(**make_inputs(batch)).logits[:, batch["keep"]]
    loss = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def largest_difference(gradients, expected):
    assert gradients.keys() == expected.keys()
    differences = [(gradients[name] - expected[name]).abs().max() for name in expected]
    largest = max(gradient.abs().max() for gradient in expected.values())
    return float(max(differences) / largest)


@pytest.mark.parametrize("setting", ["none", "full"])
@pytest.mark.parametrize("family", PACKED_HYBRIDS)
def test_gradients_of_packed_rows_equal_those_of_padded_rows(family, setting):
    model = build_model(family)
    expected = gradients_of(model, collate_padded(make_samples(), 0))
    checkpoint_activations(model, setting)
    choice = choose_packing(model, CPU, CONFIG)
    assert choice.rows == "segments"
    assert choice.mixers
    packed = gradients_of(model, collate_packed(make_samples()))
    assert largest_difference(packed, expected) <= 1e-6
    # Rows that are not packed are computed as before.
    with attention.without_packing(model):
        padded = gradients_of(model, collate_padded(make_samples(), 0))
    assert largest_difference(padded, expected) <= 1e-6


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2"])
def test_gradients_of_adapters(family):
    config = Config(model="m", dataset="d", lora={"enable": True, "rank": 4, "dropout": 0.0})
    model = add_adapters(build_model(family), config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, so that lora_A would have no gradient
                parameter.normal_(std=0.1)
    expected = gradients_of(model, collate_padded(make_samples(), 0))
    checkpoint_activations(model, "full")
    assert choose_packing(model, CPU, config).rows == "segments"
    packed = gradients_of(model, collate_packed(make_samples()))
    assert largest_difference(packed, expected) <= 1e-6


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2"])
def test_generation_is_unchanged(family):
    model = build_model(family).eval()
    ids = torch.arange(3, 13).unsqueeze(0)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    assert choose_packing(model, CPU, CONFIG).rows == "segments"
    with attention.without_packing(model):
        assert torch.equal(model.generate(ids, **settings), expected)


class ReadingFinder(TorchDispatchMode):
    """Finds operations for which the host of a GPU would wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch_compat.is_item_op(func) or func is torch.ops.aten.nonzero.default:
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "bamba", "falcon_h1", "lfm2"])
def test_host_reads_no_tensor(family):
    model = build_model(family)
    assert choose_packing(model, CPU, CONFIG).rows == "segments"
    batch = collate_packed(make_samples())
    with ReadingFinder() as finder:
        model(**make_inputs(batch)).logits.square().sum().backward()
    assert finder.found == []


def test_samples_mix_without_the_layers():
    model = build_model("qwen3_next")
    expected = gradients_of(model, collate_padded(make_samples(), 0))
    batch = collate_packed(make_samples())
    assert choose_packing(model, CPU, CONFIG).rows == "segments"
    mixers.uninstall(model)
    for name in ("cu_seqlens", "max_seqlen"):  # the kernels of its layers call other things so
        del batch[name]
    for mixer in mixers.find_mixers(model):
        assert "forward" not in vars(mixer) or not hasattr(mixer.forward, "func")
    model.set_attn_implementation("sdpa")
    del batch["segment_lengths"]
    assert largest_difference(gradients_of(model, batch), expected) > 1e-3


def test_check_covers_short_and_long_samples():
    expected = {"qwen3_next": (3, 69, 1), "lfm2": (2, 69, 1), "bamba": (3, 21, 1)}
    for family, lengths in expected.items():
        assert mixers.check_lengths(mixers.find_mixers(build_model(family))) == lengths


class UnknownLayer(nn.Module):
    """A convolution layer without a cache, which is not one of transformers'."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer
        self.mixer.width = self.mixer.__dict__.pop("conv_kernel_size")

    def forward(self, hidden_states, **_):
        return self.mixer(hidden_states)


def add_unknown_layer(model):
    model.model.layers[0].conv = UnknownLayer(model.model.layers[0].conv)


def add_layer_that_joins_rows(model):
    """Compute the samples that are computed together as one row."""
    mixer = model.model.layers[0].conv
    forward = mixer.forward

    def compute(hidden_states, **inputs):
        joined = hidden_states.flatten(0, 1).unsqueeze(0)
        return forward(joined, **inputs).view(hidden_states.shape)

    mixer.forward = compute


def add_layer_with_long_reach(model):
    """Add to each token the token 64 places before it, which is in the row of long samples only."""

    def reach(layer, args, result):
        return result + nn.functional.pad(result, (0, 0, 64, 0))[:, : result.shape[1]]

    model.model.layers[1].register_forward_hook(reach)


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (add_unknown_layer, "Lfm2ShortConv"),
        (add_layer_that_joins_rows, "Lfm2ShortConv"),
        (add_layer_with_long_reach, "Lfm2ShortConv"),
    ],
)
def test_layers_that_mix_are_found(change, layer):
    model = build_model("lfm2")
    assert choose_packing(model, CPU, CONFIG).rows == "segments"
    model = build_model("lfm2")
    change(model)
    choice = choose_packing(model, CPU, CONFIG)
    assert choice.rows == "none"
    assert layer in str(choice.mixing)
    assert not choice.mixers
    assert base_model(model).config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("rwkv", "RwkvSelfAttention"),
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
        ("bloom", "BloomAttention"),
    ],
)
def test_reason_for_padded_rows_names_the_layer(family, layer):
    choice = choose_packing(build_model(family), CPU, CONFIG)
    assert choice.rows == "none"
    assert layer in str(choice.mixing)

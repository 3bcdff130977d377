"""What the package causal-conv1d computes, from its documentation, on any device.

The environment variable `REFERENCE_KERNELS` changes it: `ignores` the beginnings of samples, or
`old`, without an argument for them.
"""

import os

import torch
from torch.nn import functional


def convolve(x, weight, bias, seq_idx, activation):
    """x: [batch, width, tokens], weight: [width, taps], seq_idx: [batch, tokens]."""
    taps, tokens = weight.shape[1], x.shape[2]
    samples = torch.zeros_like(x[:, 0], dtype=torch.int32) if seq_idx is None else seq_idx
    result = torch.zeros_like(x)
    for tap in range(taps):
        back = taps - 1 - tap
        shifted = functional.pad(x, (back, 0))[:, :, :tokens]
        is_same = functional.pad(samples, (back, 0), value=-1)[:, :tokens] == samples
        result = result + weight[:, tap : tap + 1] * shifted * is_same.unsqueeze(1)
    if bias is not None:
        result = result + bias.unsqueeze(1)
    return result if activation is None else functional.silu(result)


if os.environ.get("REFERENCE_KERNELS") == "old":

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        return convolve(x, weight, bias, None, activation)

else:

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        if seq_idx is not None:
            assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, (x.shape[0], x.shape[2]))
            assert 1 in (x.stride(1), x.stride(2))
        if os.environ.get("REFERENCE_KERNELS") == "ignores":
            seq_idx = None
        return convolve(x, weight, bias, seq_idx, activation)

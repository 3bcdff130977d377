"""What mamba-ssm computes for Mamba 2, from its documentation, token by token."""

import torch
from causal_conv1d import convolve
from torch.nn import functional

UNLIMITED = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    dt_limit=UNLIMITED,
    return_final_states=False,
):
    """x: [batch, tokens, heads, head size], dt: [batch, tokens, heads], A: [heads], B, C: [batch,
    tokens, groups, state]."""
    assert initial_states is None
    assert not return_final_states
    assert z is None
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (B, C))
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
    results = []
    for token in range(x.shape[1]):
        if seq_idx is not None and token and seq_idx[0, token] != seq_idx[0, token - 1]:
            state = torch.zeros_like(state)
        step = dt[:, token, :, None, None]
        added = torch.einsum("bhp,bhn->bhpn", x[:, token], B[:, token])
        state = state * (step * A[:, None, None]).exp() + step * added
        results.append(torch.einsum("bhpn,bhn->bhp", state, C[:, token]))
    result = torch.stack(results, dim=1)
    return result if D is None else result + x * D.unsqueeze(1)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=UNLIMITED,
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    assert not return_final_states
    assert not norm_before_gate
    heads = len(D)
    width, mixed = heads * headdim, conv1d_weight.shape[0]
    z, mixed, dt = zxbcdt.split([width, mixed, heads], dim=-1)
    mixed = convolve(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation)
    mixed = mixed.transpose(1, 2)
    size = (mixed.shape[-1] - width) // 2
    x, B, C = mixed.split([width, size, size], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (each.unflatten(-1, (ngroups, -1)) for each in (B, C))
    options = {"seq_idx": seq_idx, "dt_softplus": True, "dt_limit": dt_limit}
    result = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, dt_bias=dt_bias, **options)
    result = result.flatten(2) * functional.silu(z)
    if rmsnorm_weight is not None:
        groups = result.unflatten(-1, (ngroups, -1))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + rmsnorm_eps)
        result = groups.flatten(2) * rmsnorm_weight
    return (
        result
        if outproj_weight is None
        else functional.linear(result, outproj_weight, outproj_bias)
    )

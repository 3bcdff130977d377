"""What mamba-ssm computes for Mamba 1, from its documentation, token by token."""

import torch
from torch.nn import functional


def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    """u, delta, z: [batch, width, tokens], A: [width, state], B, C: [batch, state, tokens]."""
    assert not return_last_state
    delta = delta if delta_bias is None else delta + delta_bias.unsqueeze(1)
    delta = functional.softplus(delta) if delta_softplus else delta
    state = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    results = []
    for token in range(u.shape[2]):
        step = delta[:, :, token, None]
        state = state * (step * A).exp() + step * B[:, None, :, token] * u[:, :, token, None]
        results.append(torch.einsum("bdn,bn->bd", state, C[:, :, token]))
    result = torch.stack(results, dim=2)
    result = result if D is None else result + u * D.unsqueeze(1)
    return result if z is None else result * functional.silu(z)

"""What flash-linear-attention computes, from its documentation, token by token."""

import torch


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **kwargs,
):
    """q, k: [batch, tokens, heads, key size], v: [batch, tokens, value heads, value size], g and
    beta: [batch, tokens, value heads]."""
    assert initial_state is None
    assert not output_final_state
    tokens = q.shape[1]
    begins = {0}
    if cu_seqlens is not None:
        assert cu_seqlens.dtype == torch.int64
        assert q.shape[0] == 1
        assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
        assert cu_seqlens[-1] == tokens
        begins = set(cu_seqlens.tolist())
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    results = []
    for token in range(tokens):
        if token in begins:
            state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        state = state * g[:, token].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, token])
        written = (v[:, token] - read) * beta[:, token].unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], written)
        results.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]))
    return torch.stack(results, dim=1), None

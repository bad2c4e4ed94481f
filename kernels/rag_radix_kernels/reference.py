"""Float64 oracle for every operation of this package, written for clarity alone."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal_from: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request, with the log-sum-exp of its scores.

    Args:
        query: `[queries, query_heads, dim]`.
        key: `[keys, kv_heads, dim]`; `query_heads` is a multiple of `kv_heads`, and
            consecutive query heads share a KV head.
        value: `[keys, kv_heads, value_dim]`.
        scale: Factor on the scores before the softmax.
        causal_from: Position of the first query among the keys: query `i` then sees keys
            `[0, causal_from + i + 1)`. None lets every query see every key.

    Returns:
        Output `[queries, query_heads, value_dim]` and log-sum-exp `[queries, query_heads]`,
        both float64.
    """
    group = query.shape[1] // key.shape[1]
    q = query.double()
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale
    if causal_from is not None:
        last_visible = causal_from + torch.arange(query.shape[0])
        hidden = torch.arange(key.shape[0]) > last_visible[:, None]
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    output = torch.einsum("qhk,khd->qhd", scores.softmax(dim=-1), v)
    return output, scores.logsumexp(dim=-1)


def merge(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Attention over the union of two disjoint key sets, from the attention over each.

    Args:
        output_a: `[..., value_dim]`, attention over the first set.
        lse_a: `[...]`, log-sum-exp of its scores.
        output_b: As `output_a`, for the second set.
        lse_b: As `lse_a`, for the second set.

    Returns:
        `[..., value_dim]` in float64.
    """
    weights = torch.stack([lse_a.double(), lse_b.double()]).softmax(dim=0)
    return output_a.double() * weights[0, ..., None] + output_b.double() * weights[1, ..., None]

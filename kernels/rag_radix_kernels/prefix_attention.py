"""Attention of new tokens over a cached prefix and over themselves, on CPU.

New tokens attend to the prefix without a mask and to themselves causally; the two partial
results are merged by the log-sum-exp of their scores, which is how FlashInfer's cascade
attention does it (Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM
Inference Serving", 2025). The work is then `new × (prefix + new)` instead of
`(prefix + new)²`. Partial results come from torch's own CPU flash attention.

A KV head shared by several query heads is never repeated in memory: over the prefix the query
heads of a group become further rows of one head, and in the causal part keys and values are
broadcast with a stride of zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def extend_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's new tokens.

    Args:
        query: `[new, query_heads, dim]`.
        key: `[new, kv_heads, dim]`, the new tokens' own keys.
        value: `[new, kv_heads, value_dim]`.
        scale: Factor on the scores before the softmax.
        prefix: Keys, values and mask of the tokens before the new ones, as `gathered_attention`
            takes them for a single request. None for no such tokens.

    Returns:
        Output `[new, query_heads, value_dim]`, float32 if merged and else in the query's dtype,
        and log-sum-exp `[new, query_heads]`.
    """
    own, own_lse = causal_attention(query, key, value, scale=scale)
    if prefix is None:
        return own, own_lse
    cached, cached_lse = gathered_attention(query[None], *prefix, scale=scale)
    return merge(own, own_lse, cached[0], cached_lse[0])


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of tokens over themselves.

    Args:
        query: `[tokens, query_heads, dim]`.
        key: `[tokens, kv_heads, dim]`.
        value: `[tokens, kv_heads, value_dim]`.
        scale: Factor on the scores before the softmax.

    Returns:
        Output `[tokens, query_heads, value_dim]` and log-sum-exp `[tokens, query_heads]`.
    """
    tokens, query_heads, _ = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    # KV heads take the batch dimension, so that one head of keys serves its whole group.
    grouped = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    key, value = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (key, value))
    output, lse = _attend(grouped, key, value, scale=scale, causal=True)
    return (
        output.permute(2, 0, 1, 3).reshape(tokens, query_heads, -1),
        lse.permute(2, 0, 1).reshape(tokens, query_heads),
    )


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention of a batch of requests, each over its own gathered keys.

    The keys of a request may come in `splits` pieces of equal length: they are attended to
    independently and merged, which gives threads something to do when there are fewer KV heads
    than threads ("flash decoding", Dao et al., 2023).

    Args:
        query: `[requests, rows, query_heads, dim]`.
        key: `[requests, splits, keys, kv_heads, dim]`.
        value: `[requests, splits, keys, kv_heads, value_dim]`.
        mask: Float32 `[requests, splits, 1, keys]`, 0 for a key and -inf for what isn't to be
            read, or with a row for each query head of a group and each of `rows`, in this order,
            instead of the 1. Every row needs a key in every split. None where all are read.
        scale: Factor on the scores before the softmax.

    Returns:
        Output `[requests, rows, query_heads, value_dim]` and log-sum-exp
        `[requests, rows, query_heads]`.
    """
    requests, rows, query_heads, _ = query.shape
    splits, kv_heads = key.shape[1], key.shape[3]
    group = query_heads // kv_heads
    folded = query.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    folded = folded[:, None].expand(-1, splits, -1, -1, -1).flatten(0, 1)
    key, value = (t.flatten(0, 1).transpose(1, 2) for t in (key, value))
    if mask is not None:
        mask = mask.flatten(0, 1)[:, None]
    output, lse = _attend(folded, key, value, scale=scale, mask=mask)
    if splits > 1:
        parts = lse.unflatten(0, (requests, splits))
        weights = parts.softmax(dim=1).unsqueeze(-1)
        weighted = output.unflatten(0, (requests, splits)).float() * weights
        output, lse = weighted.sum(dim=1).to(query.dtype), parts.logsumexp(dim=1)
    return (
        output.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3),
        lse.unflatten(2, (group, rows)).permute(0, 3, 1, 2).flatten(2, 3),
    )


def merge(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the attention over each.

    Args:
        output_a: `[..., value_dim]`, attention over the first set.
        lse_a: Float32 `[...]`, log-sum-exp of its scores.
        output_b: As `output_a`, for the second set.
        lse_b: As `lse_a`, for the second set.

    Returns:
        Output `[..., value_dim]` and log-sum-exp `[...]`, both float32, so that further merges
        round nothing.
    """
    weight_b = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    output = torch.lerp(output_a.float(), output_b.float(), weight_b)
    return output, torch.logaddexp(lse_a, lse_b)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention on `[batch, heads, tokens, dim]`, with any dims of keys and values."""
    value_dim = value.shape[-1]
    width = max(key.shape[-1], value_dim)
    # The kernel wants one width for all three; zero columns change neither scores nor values.
    query, key, value = (
        t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))
        for t in (query, key, value)
    )
    output, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output[..., :value_dim], lse

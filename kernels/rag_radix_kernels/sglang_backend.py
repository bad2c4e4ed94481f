"""SGLang attention backend `rag_prefix`: prefix attention on CPU.

Replaces `torch_native`, which computes every row of a sequence again when only its last tokens
are new. What the operations here don't cover takes the `torch_native` path unchanged: sliding
windows, cross-attention, encoder-only and bidirectional layers, and batches with an encoder
part. What `torch_native` would compute wrongly without saying so is refused at start: logit
soft-capping and attention sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.layers.attention.attention_registry import register_attention_backend

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "rag_prefix"


def register() -> None:
    """Make `--attention-backend rag_prefix` known to SGLang in this process."""
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(model_runner: ModelRunner) -> AttentionBackend:
    """Build the backend for a loaded model.

    Raises:
        ValueError: The model runs on another device, or needs logit soft-capping or attention
            sinks.
    """
    from rag_radix_kernels.prefix_backend import PrefixAttnBackend

    _refuse_unsupported(model_runner)
    return PrefixAttnBackend(model_runner)


def _refuse_unsupported(model_runner: ModelRunner) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    if model_runner.device != "cpu":
        raise ValueError(
            f"--attention-backend {NAME} runs on CPU only, and this server uses "
            f"{model_runner.device!r}; leave the flag out, and SGLang picks its own backend"
        )
    if model_runner.model_config.has_attention_sinks:
        raise ValueError(
            f"--attention-backend {NAME} has no attention sinks, which this model needs; "
            "serve it on a GPU"
        )
    capped = any(
        module.logit_cap > 0
        for module in model_runner.model.modules()
        if isinstance(module, RadixAttention)
    )
    if capped:
        raise ValueError(
            f"--attention-backend {NAME} has no logit soft-capping, which this model needs "
            "(torch_native would silently leave it out); serve it on a GPU"
        )

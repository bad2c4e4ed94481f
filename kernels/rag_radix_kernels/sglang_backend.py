"""SGLang attention backend `rag_prefix`: prefix attention on CPU, shared prefixes on CUDA.

On CPU it replaces `torch_native`, which computes every row of a sequence again when only its last
tokens are new. What the operations here don't cover takes the `torch_native` path unchanged:
sliding windows, cross-attention, encoder-only and bidirectional layers, and batches with an encoder
part. What `torch_native` would compute wrongly without saying so is refused at start: logit
soft-capping and attention sinks.

On CUDA it is SGLang's FlashInfer backend, which reads shared prefixes once where
`RAG_RADIX_SHARED_PREFIX=1` asks for it. With that set `--attention-backend flashinfer` does the
same, and keeps the rules that SGLang ties to that name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
)
from sglang.srt.layers.attention.attention_registry import (
    create_flashinfer_backend,
    register_attention_backend,
)

from rag_radix_kernels.options import shares_prefixes

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "rag_prefix"


logger = logging.getLogger(__name__)


def register() -> None:
    """Make `--attention-backend rag_prefix` known to SGLang in this process."""
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)
    if shares_prefixes(default=False):
        register_attention_backend("flashinfer")(create_on_cuda)


def create(model_runner: ModelRunner) -> AttentionBackend:
    """Build the backend for a loaded model.

    Raises:
        ValueError: The model runs on a device that is neither CPU nor CUDA, needs attention
            sinks or, on CPU, logit soft-capping.
    """
    if model_runner.device == "cuda":
        _refuse_sinks(model_runner)
        logger.warning(
            "SGLang ties some rules to the name flashinfer, speculative decoding among them: "
            "`--attention-backend flashinfer` has them and is otherwise the same as %s on CUDA.",
            NAME,
        )
        return create_on_cuda(model_runner)
    from rag_radix_kernels.prefix_backend import PrefixAttnBackend

    _refuse_unsupported(model_runner)
    return PrefixAttnBackend(model_runner)


def create_on_cuda(model_runner: ModelRunner) -> AttentionBackend:
    """FlashInfer's backend for a loaded model, with shared prefixes where they are switched on."""
    if not shares_prefixes(default=False):
        return create_flashinfer_backend(model_runner)
    if model_runner.use_mla_backend or model_runner.spec_algorithm.is_some():
        logger.warning(
            "RAG_RADIX_SHARED_PREFIX=1 has no effect: prefixes are read once for each request with "
            "MLA and with speculative decoding."
        )
        return create_flashinfer_backend(model_runner)
    from rag_radix_kernels.flashinfer_backend import SharedPrefixFlashInferBackend

    return SharedPrefixFlashInferBackend(
        model_runner, init_new_workspace=model_runner.init_new_workspace
    )


def _refuse_unsupported(model_runner: ModelRunner) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    if model_runner.device != "cpu":
        raise ValueError(
            f"--attention-backend {NAME} runs on CPU and CUDA only, and this server uses "
            f"{model_runner.device!r}; leave the flag out, and SGLang picks its own backend"
        )
    _refuse_sinks(model_runner)
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


def _refuse_sinks(model_runner: ModelRunner) -> None:
    if model_runner.model_config.has_attention_sinks:
        raise ValueError(
            f"--attention-backend {NAME} has no attention sinks, which this model needs; leave the "
            "flag out on a GPU, and SGLang picks a backend that has them"
        )

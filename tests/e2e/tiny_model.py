"""Models of a few million random weights, for what the real model can't show.

The weights are large enough that every token of a prompt moves the output.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from e2e.exactness import MODEL

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def make_tiny_llama(folder: Path) -> Path:
    """A Llama with heads for two tensor-parallel ranks (SmolLM2's nine can't be halved)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_COMMON, num_key_value_heads=2, head_dim=16)
    return _save(LlamaForCausalLM, config, folder)


def make_tiny_mla(folder: Path) -> Path:
    """A MiniCPM3, which caches one latent vector a token instead of keys and values."""
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    config = MiniCPM3Config(
        **_COMMON,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        scale_emb=1,
        scale_depth=1.4,
        dim_model_base=64,
    )
    return _save(MiniCPM3ForCausalLM, config, folder)


def _save(model_class: type, config: object, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model_class(config).to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder)
    return folder

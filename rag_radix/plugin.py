"""What SGLang loads in every process through the entry point `sglang.srt.plugins`."""

from __future__ import annotations


def register() -> None:
    """Make everything of ours known to SGLang by name; safe to call again.

    Nothing of it is in use until a flag selects it.
    """
    from rag_radix_kernels import sglang_backend

    sglang_backend.register()

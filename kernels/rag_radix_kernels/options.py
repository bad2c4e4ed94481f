"""What an operator may choose of these kernels beyond SGLang's own flags."""

from __future__ import annotations

import os

SHARED_PREFIX = "RAG_RADIX_SHARED_PREFIX"


def shares_prefixes(*, default: bool) -> bool:
    """Whether attention reads a prefix once for all requests of a batch that begin with it.

    Raises:
        ValueError: The variable `RAG_RADIX_SHARED_PREFIX` is neither 0 nor 1.
    """
    value = os.environ.get(SHARED_PREFIX, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{SHARED_PREFIX}={value!r}; 1 reads a shared prefix once for all, 0 once for each"
        )
    return value == "1" if value else default

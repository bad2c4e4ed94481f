"""Prompts that begin in public: a salt may cover only what follows the documents that all share.

SGLang keys a whole prompt by its `extra_key` and `cache_salt`. A key of ours belongs to the salt
from a position on; what comes before is looked up and inserted as for a request without a salt. A
node lies in one namespace, that of its own key, so all else in the tree stays as it is.
"""

from __future__ import annotations

from array import array
from typing import Any

from rag_radix.sglang_compat import RadixKey


class SaltedKey(RadixKey):
    """A prompt that its salt covers from `shared_tokens` on.

    Attributes:
        shared: What comes before, without the salt.
    """

    __slots__ = ("shared",)

    def __init__(
        self,
        token_ids: array[int],
        extra_key: str | None,
        limit: int | None,
        cache_salt: str,
        shared_tokens: int,
    ) -> None:
        super().__init__(token_ids, extra_key, limit=limit, cache_salt=cache_salt)
        self.shared = RadixKey(token_ids, extra_key, limit=shared_tokens)


def prompt_key(
    token_ids: array[int],
    extra_key: str | None,
    cache_salt: str | None,
    *,
    limit: int | None = None,
    shared_tokens: int = 0,
) -> RadixKey:
    """The key of a prompt whose first `shared_tokens`, whole pages, no salt covers.

    Args:
        token_ids: The prompt; not copied.
        extra_key: Of the request; holds for all of the prompt, since it may say what its KV is.
        cache_salt: Of the request.
        limit: Leave out what follows so many tokens.
        shared_tokens: See above.
    """
    length = len(token_ids) if limit is None else min(len(token_ids), limit)
    if not cache_salt or shared_tokens <= 0:
        return RadixKey(token_ids, extra_key, limit=limit, cache_salt=cache_salt)
    if shared_tokens >= length:
        return RadixKey(token_ids, extra_key, limit=limit)
    return SaltedKey(token_ids, extra_key, limit, cache_salt, shared_tokens)


def child_key_at(key: RadixKey, position: int, page_size: int) -> Any:
    """SGLang's, of a page that is known to be in `key`: it asks for the key's length in between,
    which takes three times as long as the rest."""
    if page_size > 1 or key.is_bigram:
        return key.child_key_at(position, page_size)
    token = key.token_ids[position]
    if key.cache_salt is not None:
        return (key.extra_key, key.cache_salt), token
    return token if key.extra_key is None else (key.extra_key, token)


def run_at(key: RadixKey, position: int) -> RadixKey:
    """The part of `key` in whose namespace `position` is, as a key of the same positions."""
    if type(key) is SaltedKey and position < key.shared.limit:
        return key.shared
    return key

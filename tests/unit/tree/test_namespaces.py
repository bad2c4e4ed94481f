"""Tenants in one tree: what a salt covers is theirs alone, what comes before is everybody's."""

from __future__ import annotations

from array import array

import pytest
from tree_harness import harness
from unit.tree.prompts import prompt

from rag_radix.cached_prefix import CachedPrefix, PrefixTracker
from rag_radix.namespaces import SaltedKey, child_key_at, prompt_key, run_at
from rag_radix.sglang_compat import RadixKey
from rag_radix.statistics import DocumentKey

TOKENS, SPANS = prompt("public", "private")
PUBLIC_END = 60


def hits(h, *args, **kwargs):
    return h.serve(*args, **kwargs).cached_tokens_device


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 32])
def test_tenants_share_public_documents_and_nothing_behind_them(page_size, chunk):
    with harness(device_tokens=2000, page_size=page_size) as h:
        shared = PUBLIC_END // page_size * page_size
        options = {"salt_from": 1, "chunk": chunk}
        assert hits(h, TOKENS, SPANS, cache_salt="a", **options) == 0
        assert hits(h, TOKENS, SPANS, cache_salt="b", **options) == shared
        whole = (len(TOKENS) - 1) // page_size * page_size
        assert hits(h, TOKENS, SPANS, cache_salt="a", **options) == whole
        assert hits(h, TOKENS, SPANS, cache_salt="b", **options) == whole
        # Who has no salt finds what is public, and what it has computed is found by all.
        assert hits(h, TOKENS, SPANS) == shared
        assert hits(h, *prompt("public", "other"), cache_salt="a", **options) == shared


def test_a_salt_alone_covers_the_whole_prompt():
    with harness(device_tokens=2000) as h:
        h.serve(TOKENS, SPANS)
        assert hits(h, TOKENS, SPANS, cache_salt="a") == 0
        assert hits(h, TOKENS, SPANS, cache_salt="a", salt_from=1) == PUBLIC_END


def test_the_salt_may_cover_the_question_alone_or_all_documents():
    with harness(device_tokens=2000) as h:
        question_only = {"cache_salt": "a", "salt_from": 2}
        h.serve(TOKENS, SPANS, **question_only)
        assert hits(h, TOKENS, SPANS, cache_salt="b", salt_from=2) == 100
        assert hits(h, TOKENS, SPANS, **question_only) == len(TOKENS) - 1
        assert hits(h, TOKENS, SPANS, cache_salt="a", salt_from=0) == 20


def test_what_stands_between_public_and_private_documents_is_private():
    with harness(device_tokens=2000) as h:
        tokens = [*TOKENS[:PUBLIC_END], *range(500, 510), *TOKENS[PUBLIC_END:]]
        spans = [SPANS[0], (SPANS[1][0], SPANS[1][1] + 10, SPANS[1][2] + 10)]
        h.serve(tokens, spans, cache_salt="a", salt_from=1)
        assert hits(h, tokens, spans, cache_salt="b", salt_from=1) == PUBLIC_END
        assert hits(h, tokens, spans) == PUBLIC_END


def test_what_a_request_without_a_salt_has_cached_is_no_private_document():
    with harness(device_tokens=2000) as h:
        h.serve(TOKENS, SPANS, cache_salt="a", salt_from=1)
        h.serve(TOKENS, SPANS)  # the same texts, in public
        owners = {o.document for node in h.nodes() for o in node.occurrences}
        assert owners == {
            DocumentKey("public"),
            DocumentKey("private"),
            DocumentKey("private", cache_salt="a"),
        }
        assert h.tree.document_frequencies.hits(DocumentKey("public")) == (1, 0, 2)


def test_a_key_holds_for_the_whole_prompt_since_it_may_say_what_its_kv_is():
    with harness(device_tokens=2000) as h:
        h.serve(TOKENS, SPANS, extra_key="adapter", cache_salt="a", salt_from=1)
        assert hits(h, TOKENS, SPANS) == 0
        assert hits(h, TOKENS, SPANS, extra_key="adapter") == PUBLIC_END


def test_public_and_private_documents_come_back_from_host():
    with harness(device_tokens=200, host_tokens=400) as h:
        h.serve(TOKENS, SPANS, cache_salt="a", salt_from=1)
        h.serve(range(10_000, 10_190))
        req = h.serve(TOKENS, SPANS, cache_salt="b", salt_from=1)
        assert (req.cached_tokens_device, req.cached_tokens_host) == (0, PUBLIC_END)
        h.serve(range(20_000, 20_190))
        req = h.serve(TOKENS, SPANS, cache_salt="a", salt_from=1)
        assert req.cached_tokens_device + req.cached_tokens_host == 100


def test_what_waits_is_looked_up_as_it_will_be_found():
    with harness(device_tokens=2000) as h:
        core = h.tree.tree_core
        core.observer = tracker = PrefixTracker(core)
        req = h.request(TOKENS, SPANS, cache_salt="b", salt_from=1)
        key = h.tree.key_of(req, array("q", TOKENS), limit=len(TOKENS) - 1)
        waiting = CachedPrefix(key)
        for salt, expected in (("a", PUBLIC_END), ("b", len(TOKENS) - 1)):
            h.serve(TOKENS, SPANS, cache_salt=salt, salt_from=1)
            tracker.refresh(waiting)
            assert waiting.tokens == expected


def test_paths_are_known_by_what_they_share():
    with harness(device_tokens=2000, policy="pgdsf-plus") as h:
        tree = h.tree
        keys = [
            h.serve(TOKENS, SPANS, cache_salt=salt, salt_from=start).rag_retrieval.keys
            for salt, start in ((None, None), ("a", 1), ("b", 1), ("a", None))
        ]
        public, a, b, closed = keys
        assert public[0] == a[0] == b[0] != closed[0]
        assert len({public[1], a[1], b[1], closed[1]}) == 4
        assert tree.counters.requests == 4


def test_where_hashes_are_chained_along_a_path_the_salt_covers_all_of_it():
    with harness(device_tokens=2000) as h:
        h.serve(TOKENS, SPANS)
        h.tree.enable_storage = True
        req = h.request(TOKENS, SPANS, cache_salt="a", salt_from=1)
        assert h.tree.key_of(req, array("q", TOKENS)).child_key()[0] == (None, "a")
        h.tree.enable_storage = False


def test_a_key_is_cut_where_its_salt_begins():
    ids = array("q", range(10))
    key = prompt_key(ids, None, "a", limit=8, shared_tokens=4)
    assert isinstance(key, SaltedKey)
    assert len(key) == 8
    assert (run_at(key, 3).cache_salt, len(run_at(key, 3))) == (None, 4)
    assert run_at(key, 4) is key
    for shared in (8, 9):
        public = prompt_key(ids, None, "a", limit=8, shared_tokens=shared)
        assert (type(public) is SaltedKey, public.cache_salt, len(public)) == (False, None, 8)
    private = prompt_key(ids, None, "a", shared_tokens=0)
    assert (type(private) is SaltedKey, private.cache_salt) == (False, "a")
    plain = prompt_key(ids, "key", None, shared_tokens=4)
    assert run_at(plain, 0) is plain


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("is_bigram", [False, True])
@pytest.mark.parametrize("extra_key", [None, "adapter"])
@pytest.mark.parametrize("cache_salt", [None, "a"])
def test_a_child_is_found_where_sglang_has_put_it(page_size, is_bigram, extra_key, cache_salt):
    key = RadixKey(array("q", range(100, 120)), extra_key, is_bigram, cache_salt=cache_salt)
    for position in (0, 8):
        expected = key.child_key_at(position, page_size)
        assert child_key_at(key, position, page_size) == expected

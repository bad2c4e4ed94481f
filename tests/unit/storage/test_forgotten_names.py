"""A node that has had more names than are kept may be any document, in its files too."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from unit.storage.stores import server

from rag_radix.control.selector import Selector


@pytest.mark.parametrize("where", ["in files", "back from files", "back and cut"])
def test_a_document_without_a_node_goes_when_its_name_is_forgotten(tmp_path, where):
    tokens = list(range(64))
    with server(tmp_path, page_size=16) as store:
        for number in range(20):
            store.ask((tokens, [(f"d{number}", 20, 28)]))
        store.tree.evict(EvictParams(num_tokens=1000))
        store.tree.evict_host(2000)
        assert store.h.nodes() == []
        if where != "in files":
            assert store.ask((tokens, [])).from_storage == 48
        if where == "back and cut":
            store.h.serve([*range(32), *range(1000, 1032)])
        removed = store.tree.control.invalidate(Selector(id="d0"))
        assert removed.storage.files > 0
        req = store.ask((tokens, []))
        assert req.from_storage + req.cached_tokens_device + req.cached_tokens_host <= 16

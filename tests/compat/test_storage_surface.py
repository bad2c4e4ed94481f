"""What storage relies on in SGLang's controller, its file backend and its host pools."""

from __future__ import annotations

import inspect
from hashlib import sha256
from typing import Any

import torch
from sglang.srt.managers import cache_controller, scheduler
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.pool_host import mha, mla
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache, _OngoingPrefetch

from rag_radix.sglang_compat import storage_directory, use_verified_files
from rag_radix.storage.backend import VerifiedFiles


def _source(function: Any) -> str:
    return inspect.getsource(inspect.unwrap(function))


def test_the_name_file_is_ours_once_the_tree_is_in_use(monkeypatch) -> None:
    monkeypatch.setattr(StorageBackendFactory, "_registry", StorageBackendFactory._registry.copy())
    use_verified_files()
    assert StorageBackendFactory._registry["file"]["loader"]() is VerifiedFiles
    assert 'if backend_name in ("file", "sim"):\n            return backend_class(' in _source(
        StorageBackendFactory._create_builtin_backend
    )


def test_files_are_where_sglang_puts_them(monkeypatch) -> None:
    config = type("Config", (), {"extra_config": {"file_storage_path": "/one"}})
    assert storage_directory(config) == "/one"
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/other")
    assert storage_directory(config) == "/other"
    source = _source(hicache_storage.HiCacheFile.__init__)
    assert "envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()" in source
    assert '.get("file_storage_path")' in source


def test_pages_pass_through_the_generic_functions_in_the_order_of_a_prompt() -> None:
    """Each batch of a node's hashes in order, with flat pages; a None ends what was read."""
    assert "for i in range(0, len(operation.hash_value), STORAGE_BATCH_SIZE)" in _source(
        HiCacheController._page_backup
    )
    assert "self.storage_backend.batch_set(hash_values, data)" in _source(
        HiCacheController._generic_page_set
    )
    get = _source(HiCacheController._generic_page_get)
    assert "self.storage_backend.batch_get(hash_values, dummy_page_dst)" in get
    assert "if page_data[i] is None:" in get
    attach = _source(HiCacheController.attach_storage_backend)
    assert '"file"' not in attach.partition("self.page_get_func = self._generic_page_get")[2]
    assert "self.storage_backend.batch_exists(" in _source(HiCacheController._storage_hit_query)


def test_host_pools_hand_over_pinned_pages_unless_the_shim_forbids_it() -> None:
    # Once this fails, the property on `HostKVCache.pin_memory` can go.
    for pool in (mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost):
        assert "pin_memory=self.pin_memory" in _source(pool.get_dummy_flat_data_page)
    for name in ("dtype", "layout", "page_size", "layer_num"):
        assert name in _source(mha.MHATokenToKVPoolHost.__init__) + _source(
            mha.MHATokenToKVPoolHost.__mro__[1].__init__
        )


def test_a_request_asks_storage_before_it_waits_and_is_found_there() -> None:
    queue = _source(scheduler.Scheduler._add_request_to_queue)
    assert queue.index("self._prefetch_kvcache(req)") < queue.index("self.waiting_queue.append")
    prefetch = _source(scheduler.Scheduler._prefetch_kvcache)
    assert "tree_cache.is_backuped(last_host_node)" in prefetch


def test_what_is_under_way_says_on_which_node_it_has_a_lock() -> None:
    assert "anchor_node_id" in _OngoingPrefetch._fields
    assert "self.ongoing_backup[operation_id] = (\n            node_id,\n" in _source(
        UnifiedRadixCache.write_backup_storage
    )


def test_a_node_is_written_when_its_copy_is_done_and_by_one_call() -> None:
    assert "self.write_backup_storage(node_id)" in _source(
        UnifiedRadixCache._finish_write_through_ack
    )
    assert "self.cache_controller.write_storage(" in _source(UnifiedRadixCache.write_backup_storage)


# What ours goes along with step by step; where it changes, ours may have to as well.
FOLLOWED = (
    UnifiedRadixCache._handle_prefetch_result,
    UnifiedRadixCache.release_aborted_request,
    UnifiedRadixCache.write_backup_storage,
    UnifiedRadixCache.release_host_resources,
    UnifiedRadixCache.detach_storage_backend,
    HiCacheController._stop_storage_threads,
    cache_controller.PrefetchOperation,
)
FOLLOWED_DIGEST = "7b383cbb80609a04"


def test_what_ours_goes_along_with_has_not_changed() -> None:
    sources = "".join(map(_source, FOLLOWED))
    assert sha256(sources.encode()).hexdigest()[:16] == FOLLOWED_DIGEST


def test_a_latent_pool_and_a_headed_one_have_pages_of_bytes() -> None:
    page = torch.zeros(2, 3, dtype=torch.bfloat16).flatten()
    assert page.view(torch.uint8).numpy().nbytes == 12

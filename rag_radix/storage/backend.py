"""SGLang's storage backend `file`, in verified files: what its storage threads call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rag_radix.sglang_compat import HiCacheStorage, storage_directory
from rag_radix.storage.files import SegmentFiles


class VerifiedFiles(HiCacheStorage):
    """Takes the place of SGLang's `file` where the knowledge tree is in use.

    Serves nothing until it is told whose KV it holds (`open`), which only the tree knows.

    Attributes:
        config: SGLang's `HiCacheStorageConfig`.
        root: The directory of all models and ranks.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.root = Path(storage_directory(config))
        self._files: SegmentFiles | None = None

    def open(self, files: SegmentFiles) -> None:
        self._files = files

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return 0 if self._files is None else self._files.count(keys)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill `target_locations`, flat pages of the host pool's form; None from the first page
        on that isn't there or isn't right."""
        read = 0
        if self._files is not None:
            read = self._files.read(keys, [_bytes_of(page) for page in target_locations])
        return [*target_locations[:read], *[None] * (len(keys) - read)]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if self._files is None:
            return False
        return self._files.write(keys, [_bytes_of(page) for page in values])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        self._files = None


def _bytes_of(page: torch.Tensor) -> memoryview:
    return memoryview(page.contiguous().view(-1).view(torch.uint8).numpy())

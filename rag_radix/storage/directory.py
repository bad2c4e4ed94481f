"""Which files a directory has, of all servers that use it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from rag_radix.storage.index import PageIndex, Segment
from rag_radix.storage.segment import SUFFIX, DamagedFileError, read_header, remove_leftovers

logger = logging.getLogger(__name__)

# Between looks for files of other servers.
_RESCAN_S = 0.5


@dataclass(slots=True)
class FileCounters:
    """Since start.

    Attributes:
        written_files, written_pages, written_bytes: New ones.
        read_pages: Read and found right.
        evicted_files: Left to keep the budget.
        removed_pages: Gone by invalidation.
        damaged_files: Skipped.
        failed_writes: Batches of pages that couldn't be written.
    """

    written_files: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    read_pages: int = 0
    evicted_files: int = 0
    removed_pages: int = 0
    damaged_files: int = 0
    failed_writes: int = 0


class Directory:
    """The files of one identity in a directory, which is made if there is none. One thread at a
    time may use it.

    Attributes:
        path: Of the directory.
        index: Of the files' pages.
    """

    def __init__(self, path: Path, identity: str, counters: FileCounters) -> None:
        self.path = path
        self.index = PageIndex()
        self._counters = counters
        self._identity = identity
        self._skipped: set[str] = set()
        self._scanned_s = 0.0
        self._scanned_mtime_ns = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
        except OSError as error:
            logger.warning("Storage: %s can't be used: %s", path, error)
        self.scan()

    def scan(self) -> None:
        """Take account of files that others have written."""
        self._scanned_s = time.monotonic()
        try:
            self._scanned_mtime_ns = self.path.stat().st_mtime_ns
            paths = sorted(self.path.glob(f"*{SUFFIX}"))
        except OSError:
            return
        for path in paths:
            if not self.index.has_file(path.name) and path.name not in self._skipped:
                try:
                    header = read_header(path)
                    if header.identity != self._identity:
                        raise DamagedFileError("it belongs to another model or layout")
                    self.index.add(Segment(path, header, path.stat().st_size))
                except FileNotFoundError:
                    continue
                except (DamagedFileError, OSError, ValueError, TypeError, KeyError) as error:
                    self._skip(path, error)

    def scan_if_due(self) -> bool:
        """Scan if others may have written since the last time, not all the time; whether that was
        done."""
        now = time.monotonic()
        if now - self._scanned_s < _RESCAN_S:
            return False
        self._scanned_s = now
        try:
            has_changed = self.path.stat().st_mtime_ns != self._scanned_mtime_ns
        except OSError:
            return False
        if has_changed:
            self.scan()
        return has_changed

    def add(self, segment: Segment) -> None:
        """A file was written."""
        self._skipped.discard(segment.path.name)
        self.index.add(segment)

    def skip(self, segment: Segment, why: object) -> None:
        """A file isn't what it says."""
        self.index.remove(segment)
        self._skip(segment.path, why)

    def _skip(self, path: Path, why: object) -> None:
        self._skipped.add(path.name)
        self._counters.damaged_files += 1
        logger.warning("Storage: %s is skipped: %s", path, why)

    def remove(self, segment: Segment) -> None:
        """Let a file be found no more, on disk neither."""
        self.index.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._skipped.add(segment.path.name)
            logger.error(
                "Storage: %s can't be removed (%s): remove it by hand, or it is read after the "
                "next start",
                segment.path,
                error,
            )

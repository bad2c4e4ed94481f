"""Which files a directory has, of all servers that use it."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rag_radix.storage.index import PageIndex, Segment
from rag_radix.storage.segment import (
    SUFFIX,
    DamagedFileError,
    ForeignFileError,
    read_header,
    remove_leftovers,
)

logger = logging.getLogger(__name__)

# Between looks for files of other servers.
_RESCAN_S = 0.5
# Until what couldn't be read or removed is tried again.
_REST_S = 30.0


@dataclass(slots=True)
class FileCounters:
    """Since start.

    Attributes:
        written_files, written_pages, written_bytes: New ones.
        read_pages: Read and found right.
        evicted_files: Left to keep the budget.
        removed_pages: Gone by invalidation.
        damaged_files: Skipped, some for a while.
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

    Whatever happens to a file, it is in the index, or gone, or another's, or known to be tried
    again: what must go can't hide in it.

    Attributes:
        path: Of the directory.
        index: Of the files' pages.
        gone_files: That had to go and went.
    """

    def __init__(self, path: Path, identity: str, counters: FileCounters) -> None:
        self.path = path
        self.index = PageIndex()
        self._counters = counters
        self._identity = identity
        self._foreign: dict[str, int] = {}  # inodes by name
        self._unread: set[str] = set()  # names of files whose headers couldn't be read
        # Of files that couldn't be removed, and whether they could be emptied.
        self._doomed: dict[str, bool] = {}
        self.gone_files = 0
        self._scanned_s = 0.0
        self._scanned_mtime_ns = -1
        self._try_again_s = 0.0
        self._device: int | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._device = path.stat().st_dev
            remove_leftovers(path)
        except OSError as error:
            logger.warning("Storage: %s can't be used: %s", path, error)
        self.scan()

    def make_anew(self) -> None:
        """Make the directory if it is gone, since it was removed or a file system has been mounted
        above it. Where one has been unmounted none is made: the disk below isn't the one that was
        meant."""
        with suppress(OSError):  # the next write says why
            if self.path.exists():
                return
            for segment in self.index:
                self.index.remove(segment)
            self._scanned_mtime_ns = -1
            above = next(each for each in self.path.parents if each.exists())
            device = above.stat().st_dev
            if self._device in (None, device) or above.is_mount():
                self.path.mkdir(parents=True, exist_ok=True)
                self._device = device
                logger.warning("Storage: %s was gone and has been made anew", self.path)

    # Files of others

    def scan(self) -> bool:
        """Take account of files that others have written; whether the directory says which there
        are."""
        self._scanned_s = time.monotonic()
        self._try_again_s = self._scanned_s + _REST_S
        self._remove_doomed()
        try:
            mtime_ns = self.path.stat().st_mtime_ns
            with os.scandir(self.path) as entries:
                found = {e.name: e.inode() for e in entries if e.name.endswith(SUFFIX)}
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        self._scanned_mtime_ns = mtime_ns
        self._unread.intersection_update(found)
        for name, inode in sorted(found.items()):
            segment = self.index.file_called(name)
            known = self._foreign.get(name) if segment is None else segment.inode
            if name not in self._doomed and known != inode:
                self._look_at(self.path / name, inode)
        return True

    def scan_if_due(self) -> bool:
        """Scan if others may have written since the last time, not all the time; whether that was
        done."""
        now_s = time.monotonic()
        if now_s - self._scanned_s < _RESCAN_S:
            return False
        self._scanned_s = now_s
        try:
            has_changed = self.path.stat().st_mtime_ns != self._scanned_mtime_ns
        except OSError:
            return False
        is_to_try_again = bool(self._unread or self._doomed) and now_s >= self._try_again_s
        return (has_changed or is_to_try_again) and self.scan()

    def scan_to_remove(self) -> bool:
        """Scan before something goes: a file that can't be read goes too, since it may be in it.
        Whether the directory says which files there are."""
        if not (is_read := self.scan()):
            logger.error(
                "Storage: %s can't be read: what is removed now may come back from files that "
                "other servers have just written. Remove it once more when it can be read",
                self.path,
            )
        for name in sorted(self._unread):
            if (segment := self.index.file_called(name)) is not None:
                self.index.remove(segment)
            self._unlink(self.path / name, must_go=True)
        self._unread.clear()
        return is_read

    def try_to_remove(self, *, now: bool = False) -> None:
        """Remove what couldn't be removed, if that is due or to be done `now`."""
        if self._doomed and (now or time.monotonic() >= self._try_again_s):
            self._try_again_s = time.monotonic() + _REST_S
            self._remove_doomed()

    def _remove_doomed(self) -> None:
        for name in sorted(self._doomed):
            self._unlink(self.path / name, must_go=True)

    @property
    def left_files(self) -> int:
        """Files that aren't read any more and couldn't be removed, nor emptied: whoever scans the
        directory next may read them."""
        return sum(not is_empty for is_empty in self._doomed.values())

    def _look_at(self, path: Path, inode: int) -> None:
        """Take account of a file, and no more of the one before it under its name."""
        former = self.index.file_called(path.name)
        try:
            header = read_header(path)
            if header.identity != self._identity:
                raise ForeignFileError("it belongs to another model or layout")
            self.add(Segment(path, header, path.stat().st_size, inode))
            return
        except FileNotFoundError:
            pass
        except ForeignFileError as error:
            self._foreign[path.name] = inode
            self._skipped(path, error)
        except DamagedFileError as error:
            self._remove_damaged(path, error)
        except OSError as error:
            if path.name not in self._unread:
                self._unread.add(path.name)
                self._skipped(path, error)
            return
        if former is not None:
            self.index.remove(former)

    def _skipped(self, path: Path, why: object) -> None:
        self._counters.damaged_files += 1
        logger.warning("Storage: %s is skipped: %s", path, why)

    # Files that are known

    def add(self, segment: Segment) -> None:
        """A file is there."""
        name = segment.path.name
        self._foreign.pop(name, None)
        self._unread.discard(name)
        self._doomed.pop(name, None)
        self.index.add(segment)

    def unreadable(self, segment: Segment, why: OSError) -> None:
        """A file can't be read now, which may pass."""
        if not segment.readable_s:
            self._skipped(segment.path, f"it can't be read for now: {why}")
        segment.readable_s = time.monotonic() + _REST_S

    def is_another(self, segment: Segment, why: DamagedFileError) -> bool:
        """A page isn't what the header of its file said: whether another server has written the
        file anew. If none has, it is damaged and goes."""
        path = segment.path
        if self.index.file_called(path.name) is not segment:
            return False
        try:
            inode = path.stat().st_ino
        except OSError:
            inode = segment.inode
        self._look_at(path, inode)
        there = self.index.file_called(path.name)
        if there is segment:  # its header can't be read any more
            segment.readable_s = time.monotonic() + _REST_S
        elif there is not None and there.header == segment.header:
            self.index.remove(there)
            self._remove_damaged(path, why)
        return there is not None and there.header != segment.header

    def _remove_damaged(self, path: Path, why: DamagedFileError) -> None:
        self._skipped(path, f"{why}. It is removed")
        self._unlink(path)

    def remove(self, segment: Segment, *, must_go: bool = False) -> None:
        """Let a file be found no more, on disk neither; it `must_go` unless it may come back."""
        self.index.remove(segment)
        self._unlink(segment.path, must_go=must_go)

    def clear(self) -> None:
        """Remove all files but those of others."""
        self.scan_to_remove()
        for segment in self.index:
            self.remove(segment, must_go=True)

    def _unlink(self, path: Path, *, must_go: bool = False) -> None:
        was_empty = self._doomed.get(path.name)
        try:
            path.unlink(missing_ok=True)
            self._doomed.pop(path.name, None)
            is_gone = True
        except OSError as error:
            is_gone = self._doomed[path.name] = _is_emptied(path)
            if was_empty is None:
                what_now = (
                    "so it has been emptied"
                    if is_gone
                    else "which is tried again: remove it by hand before the next start, or it is "
                    "read then"
                )
                logger.error("Storage: %s can't be removed (%s), %s", path, error, what_now)
        self.gone_files += must_go and is_gone and not was_empty


def _is_emptied(path: Path) -> bool:
    """Whether nothing is left in a file: where a directory can't be written, its files may."""
    try:
        os.truncate(path, 0)
    except OSError:
        return False
    return True

"""One file of consecutive pages of a prompt: written whole or not at all, verified when read.

Layout: magic, length of the header, digest of the header, header (JSON), pages one after the other.
The header holds a digest for each page, so that a part of a file can be read and verified.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import orjson

FORMAT_VERSION = 2
SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_MAGIC = b"RAGRADIX"
_PREFIX = struct.Struct("<8sII16s")  # magic, format version, header bytes, header digest
_MAX_HEADER_BYTES = 64 << 20
_LEFTOVER_S = 3600.0


class DamagedFileError(Exception):
    """A file isn't what it should be; the message says how."""


class ForeignFileError(DamagedFileError):
    """A file is another's, or of another version."""


class Name(NamedTuple):
    """A document that ends with a page, as far as a file says it: a namespace has a name there,
    since a salt is a secret.

    Attributes:
        tokens: Its length; 0 where only a part of it lies here, or it ends somewhere else.
    """

    id: str
    version: str
    namespace: str
    tokens: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        identity: What its KV belongs to; see `identity`.
        parent: Hash of the page before the first, None at the beginning of a prompt.
        hashes: SGLang's hash of each page, which depends on all pages before it.
        digests: Of the bytes of each page.
        page_bytes: Size of a page.
        mark: Hash of the last page of the node that it was written for.
        mark_pages: Pages of that node.
        names: Its documents.
        namespace: Name of the one that it is in.
        tokens: Of all pages, see `packed`; empty in a tenant's namespace.
    """

    identity: str
    parent: str | None
    hashes: tuple[str, ...]
    digests: tuple[str, ...]
    page_bytes: int
    mark: str
    mark_pages: int
    names: tuple[Name, ...]
    namespace: str = ""
    tokens: str = ""


def packed(tokens: array[int]) -> str:
    """Token ids (an `array` of "q") as text."""
    return b64encode(tokens.tobytes()).decode()


def unpacked(text: str) -> array[int]:
    """What was `packed`. Raises ValueError for any other text."""
    return array("q", b64decode(text))


def file_name(hashes: Sequence[str]) -> str:
    return f"{hashes[0][:24]}-{hashes[-1][:24]}-{len(hashes)}{SUFFIX}"


def page_digest(page: memoryview | bytes) -> str:
    return sha256(page).hexdigest()[:32]


def write_segment(
    path: Path, header: Header, pages: Sequence[memoryview | bytes]
) -> os.stat_result:
    """Write a file that is whole as soon as it is there; returns its status.

    Raises:
        OSError: It can't be written. Nothing is left of it.
    """
    return write_atomically(path, (_encoded(header), *pages))


def segment_bytes(header: Header) -> int:
    """Size of a file."""
    return len(_encoded(header)) + header.page_bytes * len(header.hashes)


def _encoded(header: Header) -> bytes:
    fields = {name: getattr(header, name) for name in header.__dataclass_fields__}
    text = orjson.dumps(fields, default=list)  # of a named tuple
    digest = sha256(text).digest()[:16]
    return _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text), digest) + text


def write_atomically(path: Path, parts: Sequence[memoryview | bytes]) -> os.stat_result:
    """Write `parts` to a file beside `path` and let it take the place of `path`; returns its
    status.

    Raises:
        OSError: It can't be written. Nothing is left of it.
    """
    # Servers in containers may have the same process id.
    temporary = path.with_name(f".{token_hex(12)}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            with suppress(OSError):  # there are file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.writelines(parts)
            file.flush()
            status = os.fstat(file.fileno())
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return status


def read_header(path: Path) -> Header:
    """Read and verify what a file says of itself.

    Raises:
        ForeignFileError: It isn't one of ours, or is of another version.
        DamagedFileError: It isn't whole.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        start = file.read(_PREFIX.size)
        if not _MAGIC.startswith(start[: len(_MAGIC)]):
            raise ForeignFileError("it isn't a file of KV")
        if len(start) < _PREFIX.size:
            raise DamagedFileError("it is too short")
        _, version, length, digest = _PREFIX.unpack(start)
        if version != FORMAT_VERSION:
            raise ForeignFileError(f"it has format {version}, not {FORMAT_VERSION}")
        text = file.read(min(length, _MAX_HEADER_BYTES))
        if sha256(text).digest()[:16] != digest:
            raise DamagedFileError("its header is damaged")
        size = os.fstat(file.fileno()).st_size
    header = _decoded(text)
    if size != _PREFIX.size + length + header.page_bytes * len(header.hashes):
        raise DamagedFileError("it is cut off")
    return header


def _decoded(text: bytes) -> Header:
    try:
        fields = orjson.loads(text)
        fields["hashes"] = tuple(fields["hashes"])
        fields["digests"] = tuple(fields["digests"])
        fields["names"] = tuple(Name(*name) for name in fields["names"])
        header = Header(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"its header can't be understood: {error}") from None
    hashes = header.hashes
    chain = {header.parent, *hashes}
    if not hashes or len(chain) <= len(hashes) or len(header.digests) != len(hashes):
        raise DamagedFileError("its header contradicts itself")
    return header


def right_pages(header: Header, first: int, pages: Sequence[memoryview]) -> int:
    """How many of `pages`, from `first` on, are those of a file, up to one that isn't."""
    digests = header.digests[first:]
    wrong = (i for i, page in enumerate(pages) if page_digest(page) != digests[i])
    return next(wrong, len(pages))


def read_pages(path: Path, header: Header, first: int, pages: Sequence[memoryview]) -> None:
    """Read consecutive pages from `first` on into `pages`, and verify them.

    Raises:
        DamagedFileError: The file has changed since its header was read, or a page is damaged.
        OSError: It can't be read.
    """
    # Buffered, so that a page is whole where a file system returns less than it is asked for.
    with path.open("rb") as file:
        start = file.read(_PREFIX.size)
        if len(start) < _PREFIX.size:
            raise DamagedFileError("it is too short")
        _, _, length, _ = _PREFIX.unpack(start)
        file.seek(_PREFIX.size + length + first * header.page_bytes)
        for index, page in enumerate(pages, first):
            if len(page) != header.page_bytes or file.readinto(page) != header.page_bytes:
                raise DamagedFileError(f"page {index} has another size")
            if page_digest(page) != header.digests[index]:
                raise DamagedFileError(f"page {index} is damaged")


def remove_leftovers(directory: Path) -> None:
    """Remove what was being written an hour ago or more when its server ended. A file that is
    being written is locked, so a clock that jumps lets none of these look old.

    Raises:
        OSError: The directory can't be used.
    """
    for path in directory.glob(f".*{_TEMPORARY}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_mtime < time.time() - _LEFTOVER_S:
                path.unlink(missing_ok=True)

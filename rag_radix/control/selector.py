"""Which documents an operator means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import orjson

from rag_radix.errors import ControlError
from rag_radix.statistics import namespace_name
from rag_radix.wire import MAX_NAME_CHARS

MAX_BODY_BYTES = 1 << 20
NAMESPACE_FIELDS = ("namespace", "cache_salt", "extra_key")


class NamedDocument(Protocol):
    """What a selector asks of a document."""

    @property
    def id(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def namespace(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Selector:
    """Documents by id, by id and version, by a prefix of their ids, or all.

    Attributes:
        id: The document's id, if one is meant.
        version: Only this revision of it; None for every one.
        prefix: What the ids begin with; "" is all documents.
        namespace: Only those of this namespace, by the name that `/rag/documents` gives it;
            "" is the one without a salt or key, None is every one.
        newer_version: Of the document's revisions all that have a name, except this one.
    """

    id: str | None = None
    version: str | None = None
    prefix: str | None = None
    namespace: str | None = None
    newer_version: str | None = None

    def means(self, id: str) -> bool:
        """Whether documents of that id may be meant."""
        return id == self.id if self.prefix is None else id.startswith(self.prefix)

    def matches(self, document: NamedDocument) -> bool:
        named = self.means(document.id) and self.version in (None, document.version)
        if self.newer_version is not None and document.version in ("", self.newer_version):
            return False
        return named and self.namespace in (None, document.namespace)

    @property
    def is_all(self) -> bool:
        """Whether it means prompts without documents, too."""
        return self.prefix == ""

    def ids(self, known: Iterable[str]) -> list[str]:
        """The ids that are meant, of all that are `known`."""
        if self.prefix is not None:
            return [id for id in known if id.startswith(self.prefix)]
        return [] if self.id is None else [self.id]

    @property
    def is_everything(self) -> bool:
        return self.is_all and self.namespace is None

    @property
    def description(self) -> str:
        """For a message."""
        if self.prefix is not None:
            return f"every document whose id begins with {self.prefix!r}"
        version = "" if self.version is None else f" of version {self.version!r}"
        return f"the document {self.id!r}{version}"

    def as_json(self) -> dict[str, str]:
        """The fields that are given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def parse_selector(body: Mapping[str, Any]) -> Selector:
    """Read `{"id", "version", "prefix", "all"}` and `NAMESPACE_FIELDS` of a call's body.

    Raises:
        ControlError: Not exactly one of id, prefix and all is given, or one is malformed.
    """
    given = [name for name in ("id", "prefix", "all") if name in body]
    if len(given) != 1:
        raise ControlError(
            'say which documents: exactly one of "id", "prefix" and "all" must be given, not '
            + (" and ".join(given) or "none")
        )
    if "version" in body and given != ["id"]:
        raise ControlError('"version" needs an "id" beside it')
    if given == ["all"]:
        if body["all"] is not True:
            raise ControlError(f'"all" must be true, not {body["all"]!r:.40}')
        return Selector(prefix="", namespace=parse_namespace(body))
    return Selector(
        id=_name(body, "id"),
        version=_name(body, "version", may_be_empty=True),
        prefix=_name(body, "prefix"),
        namespace=parse_namespace(body),
    )


def parse_namespace(body: Mapping[str, Any]) -> str | None:
    """The name of the namespace that a call's body means, by that name or by what requests have.

    Raises:
        ControlError: It is given both ways, or malformed.
    """
    salt, key = (_name(body, name, may_be_empty=True) for name in ("cache_salt", "extra_key"))
    if salt is None and key is None:
        return _name(body, "namespace", may_be_empty=True)
    if "namespace" in body:
        raise ControlError('give either "namespace" or "cache_salt" and "extra_key"')
    return namespace_name(key, salt)


def parse_object(body: bytes, known: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object in the body of a call, with none but `known` names.

    Raises:
        ControlError: It is something else.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ControlError(f"the body isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise ControlError("the body must be a JSON object")
    for name in value:
        if name not in known:
            raise ControlError(f"{name!r:.60} is unknown; known are {', '.join(known)}")
    return value


def _name(body: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str | None:
    value = body.get(name)
    if name not in body:
        return None
    if not isinstance(value, str):
        raise ControlError(f'"{name}" must be a string, not {value!r:.40}')
    if not value and not may_be_empty:
        raise ControlError(f'"{name}" must not be empty')
    if len(value) > MAX_NAME_CHARS:
        raise ControlError(
            f'"{name}" has {len(value)} characters, at most {MAX_NAME_CHARS} are allowed'
        )
    return value

"""The annotation that a request carries in `sampling_params.custom_params["rag"]`.

A client sends::

    {"rag": {"documents": [{"id": "wiki/17", "version": "3", "start": 812, "end": 1930}],
             "unit": "token", "speculative": false, "strict": false, "salt_from": 1,
             "counts": true}}

`documents` is required; a document needs `id` and either `start` and `end` (half-open, in
`unit`: `token` counts `input_ids`, `char` counts the code points of a text prompt) or, in chat
completions, `text`. Everything else may be left out, unknown names are refused. `salt_from` is how
many documents the request's `cache_salt` doesn't cover: it covers all that follows the last of
them, and with 0 the first document and what follows. Without it the salt covers the whole prompt.
`counts` is false where the request goes on with a retrieval that has been counted before.

Behind the door of the server the same object is always in its normalised form: every name
present, `unit` is `token`, offsets lie within the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from rag_radix.document import Annotation, DocumentSpan
from rag_radix.errors import AnnotationError

KEY = "rag"
MAX_DOCUMENTS = 1024
MAX_NAME_CHARS = 512

Unit = Literal["token", "char"]

_ANNOTATION_FIELDS = ("documents", "unit", "speculative", "strict", "salt_from", "counts")
_DOCUMENT_FIELDS = ("id", "version", "start", "end", "text")


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A document of a chat completion, to be found in the templated prompt by its text."""

    id: str
    text: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class RawAnnotation:
    """A well-formed annotation, not yet placed in a prompt.

    Attributes:
        spans: Ascending, disjoint, non-empty; offsets in `unit`, not checked against a prompt.
        texts: Used instead of `spans` when the documents carry their text.
        unit: What the offsets of `spans` count.
        speculative: The request is a guess that may be refused or cancelled.
        strict: Refuse the request when its documents can't be placed.
        salt_from: So many documents come before what the request's salt covers; None where that is
            all of the prompt.
        counts: The request is a retrieval of its own in the statistics.
    """

    spans: tuple[DocumentSpan, ...] = ()
    texts: tuple[DocumentText, ...] = ()
    unit: Unit = "token"
    speculative: bool = False
    strict: bool = False
    salt_from: int | None = None
    counts: bool = True


def parse(custom_params: object) -> RawAnnotation | None:
    """Read and check what a client sent; None when it said nothing about documents.

    Raises:
        AnnotationError: Something is malformed; its `field` names what.
    """
    if custom_params is None:
        return None
    if not isinstance(custom_params, dict):
        raise AnnotationError("custom_params", f"must be an object, not {_kind(custom_params)}")
    if KEY not in custom_params:
        return None
    rag = _object(custom_params[KEY], KEY, _ANNOTATION_FIELDS)
    unit = rag.get("unit", "token")
    if unit not in ("token", "char"):
        raise AnnotationError("rag.unit", f"must be 'token' or 'char', not {unit!r:.40}")
    spans, texts = _documents(rag)
    return RawAnnotation(
        spans=spans,
        texts=texts,
        unit=cast(Unit, unit),
        speculative=_flag(rag, "speculative"),
        strict=_flag(rag, "strict"),
        salt_from=_index(rag, "salt_from", len(spans or texts)),
        counts=_flag(rag, "counts", default=True),
    )


def check_within(raw: RawAnnotation, length: int, prompt: str) -> None:
    """Check the offsets against the prompt they count.

    Args:
        raw: Documents with offsets.
        length: Size of the prompt in `raw.unit`.
        prompt: How to call the prompt in a message.

    Raises:
        AnnotationError: A document ends beyond the prompt.
    """
    for index, span in enumerate(raw.spans):
        if span.end > length:
            raise AnnotationError(
                f"rag.documents[{index}].end",
                f"{span.end} is beyond the {length} {raw.unit}s of {prompt}",
            )


def normalised(
    documents: Iterable[DocumentSpan],
    *,
    speculative: bool,
    strict: bool,
    salt_from: int | None = None,
    counts: bool = True,
) -> dict[str, Any]:
    """The value of `custom_params["rag"]` that goes to the scheduler.

    Args:
        documents: Spans in tokens of the final `input_ids`.
        speculative: As the client said.
        strict: As the client said.
        salt_from: Among these documents.
        counts: As the client said.
    """
    return {
        "documents": [
            {"id": d.id, "version": d.version, "start": d.start, "end": d.end} for d in documents
        ],
        "unit": "token",
        "speculative": speculative,
        "strict": strict,
        "salt_from": salt_from,
        "counts": counts,
    }


def spans(custom_params: object) -> Annotation | None:
    """Read the normalised form, without checking it again; None for unannotated requests.

    What isn't in that form counts as unannotated: it came past the door, out of a process in
    which SGLang loads no plugins (`Engine.attach_tokenizer_worker`), and must not end a scheduler.
    """
    rag = custom_params.get(KEY) if isinstance(custom_params, dict) else None
    if rag is None:
        return None
    try:
        documents = tuple(
            DocumentSpan(d["id"], d["start"], d["end"], d["version"]) for d in rag["documents"]
        )
        if rag["unit"] != "token":
            return None
        return Annotation(
            documents, rag["speculative"], rag.get("salt_from"), rag.get("counts", True)
        )
    except (AttributeError, KeyError, TypeError):
        return None


def _documents(
    rag: dict[str, Any],
) -> tuple[tuple[DocumentSpan, ...], tuple[DocumentText, ...]]:
    if "documents" not in rag:
        raise AnnotationError("rag.documents", "is missing")
    items = rag["documents"]
    if not isinstance(items, list):
        raise AnnotationError("rag.documents", f"must be an array, not {_kind(items)}")
    if len(items) > MAX_DOCUMENTS:
        raise AnnotationError(
            "rag.documents", f"has {len(items)} entries, at most {MAX_DOCUMENTS} are allowed"
        )
    spans: list[DocumentSpan] = []
    texts: list[DocumentText] = []
    for index, item in enumerate(items):
        field = f"rag.documents[{index}]"
        document = _object(item, field, _DOCUMENT_FIELDS)
        name = _string(document, field, "id")
        version = _string(document, field, "version") if "version" in document else ""
        if not name:
            raise AnnotationError(f"{field}.id", "must not be empty")
        if "text" in document:
            texts.append(DocumentText(name, _text(document, field), version))
        else:
            after = spans[-1].end if spans else 0
            start, end = _range(document, field, after)
            spans.append(DocumentSpan(name, start, end, version))
        if spans and texts:
            raise AnnotationError(
                field, "give all documents their text, or all of them start and end, not both"
            )
    return tuple(spans), tuple(texts)


def _range(document: dict[str, Any], field: str, after: int) -> tuple[int, int]:
    for name in ("start", "end"):
        if name not in document:
            raise AnnotationError(f"{field}.{name}", "is missing")
        if type(document[name]) is not int:
            raise AnnotationError(
                f"{field}.{name}", f"must be an integer, not {_kind(document[name])}"
            )
    start, end = document["start"], document["end"]
    if start < 0:
        raise AnnotationError(f"{field}.start", f"{start} is negative")
    if start < after:
        raise AnnotationError(
            f"{field}.start",
            f"{start} lies before {after}, where the previous document ends; "
            "documents must be ascending and disjoint",
        )
    if end <= start:
        raise AnnotationError(f"{field}.end", f"{end} must be greater than start ({start})")
    return start, end


def _text(document: dict[str, Any], field: str) -> str:
    for name in ("start", "end"):
        if name in document:
            raise AnnotationError(
                f"{field}.{name}", "can't stand beside text: give either offsets or the text"
            )
    text = document["text"]
    if not isinstance(text, str):
        raise AnnotationError(f"{field}.text", f"must be a string, not {_kind(text)}")
    if not text.strip():
        raise AnnotationError(f"{field}.text", "must hold more than white space")
    return text


def _object(value: object, field: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise AnnotationError(field, f"must be an object, not {_kind(value)}")
    for name in value:
        if name not in known:
            raise AnnotationError(
                f"{field}.{str(name)[:40]}", f"is unknown; known are {', '.join(known)}"
            )
    return value


def _string(document: dict[str, Any], field: str, name: str) -> str:
    if name not in document:
        raise AnnotationError(f"{field}.{name}", "is missing")
    value = document[name]
    if not isinstance(value, str):
        raise AnnotationError(f"{field}.{name}", f"must be a string, not {_kind(value)}")
    if len(value) > MAX_NAME_CHARS:
        raise AnnotationError(
            f"{field}.{name}",
            f"has {len(value)} characters, at most {MAX_NAME_CHARS} are allowed",
        )
    try:
        value.encode()
    except UnicodeEncodeError:  # neither answers nor files could name the document
        problem = "must be valid Unicode, it has a lone surrogate"
        raise AnnotationError(f"{field}.{name}", problem) from None
    return value


def _flag(rag: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = rag.get(name, default)
    if not isinstance(value, bool):
        raise AnnotationError(f"rag.{name}", f"must be true or false, not {_kind(value)}")
    return value


def _index(rag: dict[str, Any], name: str, most: int) -> int | None:
    value = rag.get(name)
    if value is not None and type(value) is not int:
        raise AnnotationError(f"rag.{name}", f"must be an integer or null, not {_kind(value)}")
    if value is not None and not 0 <= value <= most:
        raise AnnotationError(
            f"rag.{name}", f"{value} must be from 0 to {most}, the number of documents"
        )
    return value


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    for type_, name in _JSON_KINDS:
        if isinstance(value, type_):
            return name
    return type(value).__name__


_JSON_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a fraction"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)

"""Errors that a user of rag-radix can meet."""

from __future__ import annotations

from typing import Any


class RagRadixError(Exception):
    """Root of all errors raised on purpose by rag-radix."""


class ConfigError(RagRadixError, ValueError):
    """A setting is wrong; the message names its value and the remedy."""


class AnnotationError(RagRadixError, ValueError):
    """A request's `custom_params.rag` is malformed.

    Attributes:
        field: Path of the offending field, e.g. ``rag.documents[1].start``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptError(RagRadixError, ValueError):
    """A request's `input_ids` aren't a prompt of the model's; the message names what."""


class ControlError(RagRadixError, ValueError):
    """An operator's call can't be done; the message says why."""


class TooLargeError(ControlError):
    """The body of a call is longer than such calls may be."""


class UnknownDocumentError(ControlError):
    """An operator named a document that the server doesn't know."""


class RefusedError(ControlError):
    """An operator asked for what there is no room for."""


class IncompleteError(RagRadixError, RuntimeError):
    """What an operator asked for was done in part; the message says what is left.

    Attributes:
        done: What was done, as plain JSON values.
    """

    def __init__(self, message: str, done: Any) -> None:
        super().__init__(message)
        self.done = done


class TraceError(RagRadixError, ValueError):
    """A request trace can't be read or written; the message names line and field."""


class UnsupportedError(RagRadixError, RuntimeError):
    """The server's model or flags can't be combined with what was asked for."""


class LaunchError(RagRadixError, RuntimeError):
    """A server that was started for a measurement ended or wasn't ready; with its log's end."""


class IncompatibleSGLangError(RagRadixError, RuntimeError):
    """The installed SGLang isn't the one this release was written against."""


class RpcError(RagRadixError, RuntimeError):
    """A scheduler could not do what an HTTP process asked of it."""

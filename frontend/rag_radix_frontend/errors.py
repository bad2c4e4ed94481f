"""Errors of the frontend: one root, one class for each thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FrontendError(Exception):
    """Root of every error that `rag_radix_frontend` raises on purpose."""


class ArgumentError(FrontendError, ValueError):
    """An argument has a value that can never work; the message names it and the remedy."""


class SourceError(FrontendError):
    """A document source holds a line that is no document; the message names file and line."""


class DamagedIndexError(FrontendError):
    """An index directory is missing, foreign, incomplete or altered: build it again."""


class EncoderError(FrontendError):
    """An encoder is unknown, not installed, or doesn't fit the index."""


class RetrievalError(FrontendError):
    """A retriever or a template broke its contract."""


class RequestError(FrontendError, RuntimeError):
    """The server refused a request or answered with an error; `status` is its HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ConnectionLost(RequestError):
    """The server gave no answer, or only part of one, in all attempts; the message says why."""


class RequestAborted(RequestError):
    """A request was cancelled, so its text is not an answer.

    `meta_info` is what the server said about it.
    """

    def __init__(
        self,
        message: str,
        meta_info: Mapping[str, Any] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message, status)
        self.meta_info = meta_info or {}


class SpeculationRefused(RequestAborted):
    """The server had no room for a speculation. Programs never see this."""


class SpeculationEnded(RequestAborted):
    """The server ended a speculation in favour of other requests. Programs never see this."""


class IncompatibleSGLangError(FrontendError, ImportError):
    """The installed SGLang's language differs from the one this package was made for."""

"""Asking a server again that has broken off, and when to stop."""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from urllib.error import URLError

from rag_radix_frontend.connections import StaleConnection
from rag_radix_frontend.errors import ArgumentError, ConnectionLost, RequestError

_LOG = logging.getLogger(__name__)

_SERVER_ERROR = 500
# What asking again can't change.
_LASTING = (ssl.SSLCertVerificationError, FileNotFoundError, PermissionError, InvalidURL)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often an endpoint asks again, and how long it waits.

    A request is asked again when the server can't be reached, breaks off, is silent for too long
    or answers with a status of 500 or above; never because it was refused. It begins again as
    long as its program has seen nothing of the answer.

    Attributes:
        attempts: For one request, with the first; 1 never asks again.
        first_pause_s: Before the second attempt. Each further pause is twice as long, and each is
            shortened at random by up to half, so that clients don't come back all at once.
        longest_pause_s: Bounds the pauses.
        silence_s: How long the server may be silent, in a stream between two of its pieces,
            otherwise until the whole answer; None for as long as it likes.
        continues: Let a stream of which the program has seen something go on from there;
            otherwise that it broke off is an error. An answer that was drawn at random and can't
            be taken up where it was is an error too.

    Raises:
        ArgumentError: a value is out of its range.
    """

    attempts: int = 4
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0
    silence_s: float | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ArgumentError(f"attempts must be at least 1, not {self.attempts}")
        for name in ("first_pause_s", "longest_pause_s"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} must not be negative, as {getattr(self, name)} is")
        if self.silence_s is not None and self.silence_s <= 0:
            raise ArgumentError(f"silence_s must be above 0 or None, not {self.silence_s}")

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row, at most."""
        # Beyond some number of failures the power overflows, and the bound holds anyway.
        return min(self.first_pause_s * 2.0 ** min(failures - 1, 60), self.longest_pause_s)


DEFAULT_RETRIES = Retries()


class Attempts:
    """The attempts of one request."""

    def __init__(
        self, retries: Retries, url: str, pause: Callable[[float], None] = time.sleep
    ) -> None:
        """`pause` waits for so many seconds; what it raises ends the request."""
        self._retries = retries
        self._url = url
        self._pause = pause
        self._failures = 0
        self._was_stale = False

    def costs_nothing(self, error: Exception) -> bool:
        """Whether the request may be sent again at once: a kept connection was closed, for once."""
        self._was_stale = isinstance(error, StaleConnection) and not self._was_stale
        return self._was_stale

    def failed(self, error: Exception) -> None:
        """The latest attempt failed with `error`; returns when it is time for the next one.

        Raises:
            ConnectionLost: there is none.
            Exception: `error`, where another attempt would fail as well.
        """
        if not is_transient(error):
            raise error
        self._failures += 1
        if self._failures >= self._retries.attempts:
            tries = "1 attempt" if self._failures == 1 else f"{self._failures} attempts"
            raise ConnectionLost(
                f"{self._url} gave no answer in {tries}; the last one ended with {_cause(error)}",
                _status(error),
            ) from error
        pause_s = self._retries.pause_s(self._failures) * random.uniform(0.5, 1.0)
        _LOG.warning(
            "%s, attempt %d of %d: %s; the next one in %.2f s",
            self._url,
            self._failures,
            self._retries.attempts,
            _cause(error),
            pause_s,
        )
        self._pause(pause_s)

    def broken_off(self, error: Exception, chars: int) -> ConnectionLost:
        """The error for a stream that may not go on after so many characters."""
        return ConnectionLost(
            f"{self._url} broke off after {chars} characters of an answer, in attempt "
            f"{self._failures + 1}, with {_cause(error)}; with Retries(continues=True) it "
            "would have gone on",
            _status(error),
        )


def is_transient(error: Exception) -> bool:
    """Whether the same request may fare better later."""
    if isinstance(error, RequestError):
        return error.status is not None and error.status >= _SERVER_ERROR
    cause = error.reason if isinstance(error, URLError) else error
    # What SGLang's own client asks, as it does behind a proxy, breaks off with an HTTPException.
    return isinstance(error, OSError | HTTPException) and not isinstance(cause, _LASTING)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _status(error: Exception) -> int | None:
    return error.status if isinstance(error, RequestError) else None

"""A running server's routes under `/rag`, called from the command line."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import orjson

from rag_radix.errors import ControlError

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Client:
    """Calls one server.

    Attributes:
        url: Such as http://localhost:30000.
        api_key: Its admin key, or its API key where it has no admin key.
        tls: What is asked of its certificate; None is what Python asks, which takes the
            authorities of the system or those that `SSL_CERT_FILE` names.
    """

    url: str
    api_key: str | None = None
    tls: ssl.SSLContext | None = None

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a GET.

        Raises:
            ControlError: The server can't be reached or refuses; the message says why.
        """
        return self._call(path + ("?" + urllib.parse.urlencode(query) if query else ""), None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST; raises likewise."""
        return self._call(path, orjson.dumps(body))

    def why_down(self) -> str | None:
        """Why the server doesn't answer requests; None if it does."""
        try:
            self._open(urllib.request.Request(self.url.rstrip("/") + "/health")).close()
        except (OSError, HTTPException) as error:
            return str(error)
        return None

    def delete(self, path: str) -> Any:
        """The answer to a DELETE; raises likewise."""
        return self._call(path, None, "DELETE")

    def _call(self, path: str, data: bytes | None, method: str | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            request = urllib.request.Request(
                self.url.rstrip("/") + path, data, headers, method=method
            )
            with self._open(request) as reply:
                return orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise ControlError(_reason(error, self.api_key)) from None
        except urllib.error.URLError as error:
            raise ControlError(
                f"no server answers at {self.url} ({error.reason}): is `rag-radix serve` running, "
                "and is this its --url?"
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise ControlError(f"{self.url} doesn't answer as a server does: {error}") from None

    def _open(self, request: urllib.request.Request) -> Any:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self.tls)


def _reason(error: urllib.error.HTTPError, api_key: str | None) -> str:
    if error.code in (401, 403):
        given = "needs a key: give --api-key" if api_key is None else "refuses this --api-key"
        return f"the server {given} (of its two keys the admin key, where it has one)"
    try:
        message = orjson.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        message = "does it run with --radix-cache-backend knowledge-tree?"
    return f"the server answers {error.code}: {message}"

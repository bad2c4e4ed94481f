"""Programs on servers that don't tokenize in pieces, with the tokens that the others make."""

from __future__ import annotations

from typing import Any

from rag_radix_frontend import RagEndpoint
from rag_radix_frontend.connections import Connections

from rag_radix.document import DocumentSpan
from rag_radix.errors import ConfigError
from rag_radix.placement import PieceTokenizer, piece_tokenizer


class PiecewiseConnections(Connections):
    """Sends tokens: each prompt is cut at its documents, as the knowledge tree's door cuts it."""

    def __init__(self, base_url: str, pieces: PieceTokenizer) -> None:
        super().__init__(base_url)
        self._pieces = pieces

    def request(self, route: str, data: Any = None, **options: Any) -> Any:
        """As of other connections, with tokens in place of a prompt's text."""
        asks = route == "/generate" and "text" in data
        return super().request(route, self._tokenized(data) if asks else data, **options)

    def _tokenized(self, data: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in data.items() if name != "text"}
        sampling = dict(data["sampling_params"])
        annotation = sampling.pop("custom_params", {"rag": {"documents": []}})["rag"]
        spans = [DocumentSpan(d["id"], d["start"], d["end"]) for d in annotation["documents"]]
        ids = self._pieces.place(data["text"], spans).input_ids
        return {**rest, "input_ids": ids, "sampling_params": sampling}


class PiecewiseEndpoint(RagEndpoint):
    """An endpoint with `PiecewiseConnections`.

    Raises:
        ConfigError: The tokenizer can't be used in pieces.
    """

    def __init__(self, base_url: str, tokenizer: Any) -> None:
        pieces = piece_tokenizer(tokenizer)
        if pieces is None:
            raise ConfigError("--programs need a tokenizer that works in pieces")
        self._pieces = pieces
        super().__init__(base_url)

    def _connect(self, base_url: str, api_key: str | None, verify: str | None) -> Connections:
        return PiecewiseConnections(base_url, self._pieces)

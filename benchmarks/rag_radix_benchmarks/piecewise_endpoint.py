"""Programs on servers that don't tokenize in pieces, with the tokens that the others make."""

from __future__ import annotations

from typing import Any

from rag_radix_frontend import RagEndpoint

from rag_radix.document import DocumentSpan
from rag_radix.errors import ConfigError
from rag_radix.placement import piece_tokenizer


class PiecewiseEndpoint(RagEndpoint):
    """Sends tokens: each prompt is cut at its documents, as the knowledge tree's door cuts it.

    Raises:
        ConfigError: The tokenizer can't be used in pieces.
    """

    def __init__(self, base_url: str, tokenizer: Any) -> None:
        super().__init__(base_url)
        pieces = piece_tokenizer(tokenizer)
        if pieces is None:
            raise ConfigError("--programs need a tokenizer that works in pieces")
        self._pieces = pieces

    def _post(self, route: str, data: dict[str, Any], timeout_s: float | None = None) -> Any:
        return super()._post(route, self._tokenized(data) if "text" in data else data, timeout_s)

    def _tokenized(self, data: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in data.items() if name != "text"}
        sampling = dict(data["sampling_params"])
        annotation = sampling.pop("custom_params", {"rag": {"documents": []}})["rag"]
        spans = [DocumentSpan(d["id"], d["start"], d["end"]) for d in annotation["documents"]]
        ids = self._pieces.place(data["text"], spans).input_ids
        return {**rest, "input_ids": ids, "sampling_params": sampling}

"""Frontend of rag-radix: document stores, staged search and `rag_retrieve()`.

Names load on first use, since SGLang, torch and Faiss take seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_radix_frontend.adapters import (
        CallableRetriever,
        LangChainRetriever,
        LlamaIndexRetriever,
    )
    from rag_radix_frontend.build import build_index
    from rag_radix_frontend.chat_pipeline import (
        RetrievedAnswer,
        chat_retrievals,
        retrieve_and_generate,
    )
    from rag_radix_frontend.document import Document
    from rag_radix_frontend.encoders import CallableEncoder, Encoder, load_encoder
    from rag_radix_frontend.endpoint import RagEndpoint
    from rag_radix_frontend.errors import FrontendError
    from rag_radix_frontend.messages import annotate
    from rag_radix_frontend.retries import Retries
    from rag_radix_frontend.retrieval_report import RetrievalReport
    from rag_radix_frontend.retrieve import rag_retrieve
    from rag_radix_frontend.retrieved_text import RetrievedText
    from rag_radix_frontend.retriever import FaissRetriever, Retriever, ScoredDocument, Stage
    from rag_radix_frontend.routing import ROUTING_HEADER, routing_key
    from rag_radix_frontend.staged_hnsw import StagedHNSW
    from rag_radix_frontend.staged_ivf import StagedIVF

_MODULES = {
    "CallableEncoder": "encoders",
    "CallableRetriever": "adapters",
    "Document": "document",
    "Encoder": "encoders",
    "FaissRetriever": "retriever",
    "FrontendError": "errors",
    "LangChainRetriever": "adapters",
    "LlamaIndexRetriever": "adapters",
    "RagEndpoint": "endpoint",
    "RetrievalReport": "retrieval_report",
    "RetrievedText": "retrieved_text",
    "Retries": "retries",
    "Retriever": "retriever",
    "ScoredDocument": "retriever",
    "Stage": "retriever",
    "StagedHNSW": "staged_hnsw",
    "StagedIVF": "staged_ivf",
    "annotate": "messages",
    "RetrievedAnswer": "chat_pipeline",
    "build_index": "build",
    "chat_retrievals": "chat_pipeline",
    "load_encoder": "encoders",
    "ROUTING_HEADER": "routing",
    "rag_retrieve": "retrieve",
    "routing_key": "routing",
    "retrieve_and_generate": "chat_pipeline",
}

__all__ = [
    "ROUTING_HEADER",
    "CallableEncoder",
    "CallableRetriever",
    "Document",
    "Encoder",
    "FaissRetriever",
    "FrontendError",
    "LangChainRetriever",
    "LlamaIndexRetriever",
    "RagEndpoint",
    "Retries",
    "RetrievalReport",
    "RetrievedAnswer",
    "RetrievedText",
    "Retriever",
    "ScoredDocument",
    "Stage",
    "StagedHNSW",
    "StagedIVF",
    "annotate",
    "build_index",
    "chat_retrievals",
    "load_encoder",
    "rag_retrieve",
    "retrieve_and_generate",
    "routing_key",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

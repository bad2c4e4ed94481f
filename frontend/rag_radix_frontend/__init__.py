"""Frontend of rag-radix: document stores, staged search and `rag_retrieve()`."""

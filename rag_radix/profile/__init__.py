"""`rag-radix profile`: prefill cost measured on a running server."""

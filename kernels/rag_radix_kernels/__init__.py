"""Attention operations of rag-radix. Imports nothing from `rag_radix`."""

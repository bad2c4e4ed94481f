"""Benchmarks that `rag-radix bench` runs, from a checkout or an installed wheel."""

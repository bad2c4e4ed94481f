"""rag-radix: a knowledge tree for SGLang's radix cache."""

__version__ = "0.1.0"

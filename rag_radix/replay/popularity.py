"""Which documents a synthetic query retrieves: topics, their ranked documents, popularity."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

RANKED = 8
"""Documents in a topic's ranking, and so the largest k."""
PERTURBED = 0.2
"""Chance that a place of a retrieved ranking goes to a random document ranked below it."""
FLAT_HEAD = 1e-4
"""Part of the topics over which popularity is nearly level, the shift in Zipf-Mandelbrot's law."""

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Corpus:
    """Documents and the topics that queries are about.

    Each topic ranks `RANKED` distinct documents; there is one topic for three documents, so
    that a document belongs to two or three topics, at any rank.

    Attributes:
        ranking: `[topics, RANKED]` document numbers, best first.
        lengths_tokens: `[documents]` tokens of each document.
    """

    ranking: Integers
    lengths_tokens: Integers

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.lengths_tokens)

    @property
    def topics(self) -> int:
        """How many topics there are."""
        return len(self.ranking)

    def cut(self, most_tokens: int) -> Corpus:
        """The same corpus with no document longer than this."""
        return replace(self, lengths_tokens=self.lengths_tokens.clip(max=most_tokens))

    def document_shares(self, topic_shares: Floats, k: int) -> Floats:
        """Expected share of all top-`k` retrievals of each document, `[documents]`."""
        places = rank_shares(k)
        shares = np.zeros(self.documents)
        np.add.at(shares, self.ranking.ravel(), np.outer(topic_shares, places).ravel())
        return shares


def make_corpus(rng: np.random.Generator, documents: int, mean_tokens: int) -> Corpus:
    """Draw a corpus; lengths are lognormal (sigma 0.6) within a sixteenth and 8 times the mean."""
    topics = documents // 3
    slots = topics * RANKED
    rounds = -(-slots // documents)
    order = np.concatenate([rng.permutation(documents) for _ in range(rounds)])
    ranking = order[:slots].reshape(topics, RANKED)
    # Where one permutation meets the next a topic may name a document twice.
    for topic in range(documents // RANKED, topics, documents // RANKED):
        rows = slice(max(topic - 1, 0), topic + 2)
        for row in ranking[rows]:
            while len(set(row.tolist())) < RANKED:
                row[:] = rng.choice(documents, RANKED, replace=False)
    sigma = 0.6
    lengths = rng.lognormal(np.log(mean_tokens) - sigma**2 / 2, sigma, documents)
    clipped = lengths.clip(max(mean_tokens / 16, 1), mean_tokens * 8)
    return Corpus(ranking, clipped.astype(np.int64))


def perturbed_ranks(rng: np.random.Generator, queries: int, k: int) -> Integers:
    """Ranks retrieved by each query, `[queries, k]`, distinct within a query."""
    ranks = np.tile(np.arange(RANKED), (queries, 1))
    for place in range(min(k, RANKED - 1)):
        (rows,) = np.nonzero(rng.random(queries) < PERTURBED)
        other = rng.integers(place + 1, RANKED, len(rows))
        ranks[rows, place], ranks[rows, other] = ranks[rows, other], ranks[rows, place]
    return ranks[:, :k]


def rank_shares(k: int) -> Floats:
    """Expected share of top-`k` retrievals that each rank gets, `[RANKED]`."""
    # Row = place, column = rank. The swaps are independent, so expectations multiply.
    expected = np.eye(RANKED)
    for place in range(min(k, RANKED - 1)):
        swap = np.eye(RANKED)
        below = np.arange(place + 1, RANKED)
        chance = PERTURBED / len(below)
        swap[place, place] -= PERTURBED
        swap[below, below] -= chance
        swap[place, below] = swap[below, place] = chance
        expected = swap @ expected
    shares: Floats = expected[:k].sum(axis=0) / k
    return shares


def zipf_shares(topics: int, exponent: float) -> Floats:
    """Popularity of topics by the law of Zipf and Mandelbrot, `[topics]`, falling, summing to 1.

    Plain Zipf would give the first topic alone several percent of all requests, which any
    policy keeps; many users' questions are spread over a flatter head.
    """
    weights = (np.arange(1, topics + 1) + FLAT_HEAD * topics) ** -exponent
    shares: Floats = weights / weights.sum()
    return shares


def top_share(shares: Floats, part: float) -> float:
    """Share held by the most popular `part` of all documents."""
    count = round(len(shares) * part)
    return float(np.sort(shares)[len(shares) - count :].sum())


def calibrated_shares(corpus: Corpus, *, part: float, share: float, k: int) -> Floats:
    """Popularity of topics under which the top `part` of documents get `share`, by bisection.

    Where even equally popular topics concentrate more (k = 1 leaves most documents unread),
    topics are equally popular.
    """
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        shares = corpus.document_shares(zipf_shares(corpus.topics, middle), k)
        low, high = (middle, high) if top_share(shares, part) < share else (low, middle)
    return zipf_shares(corpus.topics, high)

"""An index of 300,000 documents opens by mapping files; run with `-m slow -s` for the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from rag_radix_frontend import CallableEncoder, build_index

DOCUMENTS = 300_000
DIMENSIONS = 384
VECTORS_MB = DOCUMENTS * DIMENSIONS * 4 / 1e6

OPEN = f"""
import json, pathlib, sys, time
import faiss, numpy, orjson, tqdm
from rag_radix_frontend import CallableEncoder, FaissRetriever
from rag_radix_frontend.staged_hnsw import StagedHNSW
# What libraries take isn't the index's: numba, which searches of a graph import, takes 150 MB.
graph = faiss.IndexHNSWFlat(8, 4)
graph.add(numpy.ones((9, 8), dtype=numpy.float32))
StagedHNSW(graph).warm_up()
ones = lambda texts: numpy.ones((len(texts), {DIMENSIONS}))
encoder = CallableEncoder("random", {DIMENSIONS}, ones)
def peak_mb():
    # Not ru_maxrss: that starts with the peak of the process that launched this one.
    status = dict(x.split(":", 1) for x in pathlib.Path("/proc/self/status").open())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6
before_mb, start = peak_mb(), time.perf_counter()
retriever = FaissRetriever.open(sys.argv[1], encoder=encoder)
open_s = time.perf_counter() - start
assert retriever.store.by_id("d/299999").text.startswith("document 299999 ")
*_, stage = retriever.retrieve("query", 5)
assert len(stage.documents) == 5
print(json.dumps({{"open_s": open_s, "added_mb": peak_mb() - before_mb}}))
"""


_RANDOM = np.random.default_rng(0)


def random_vectors(texts: Sequence[str]) -> npt.NDArray[np.float64]:
    return _RANDOM.normal(size=(len(texts), DIMENSIONS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_300k_documents_open_within_200_mb_beyond_the_vectors(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "docs.jsonl"
    with source.open("wb") as out:
        for i in range(DOCUMENTS):
            line = {"id": f"d/{i}", "text": f"document {i} " + "word " * 300}
            out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    encoder = CallableEncoder("random", DIMENSIONS, random_vectors)
    build_index(source, tmp_path / "index", encoder, kind, progress=True)
    opened = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "index")],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(opened.stdout)
    print(kind, measured, f"vectors_mb={VECTORS_MB:.0f}")
    # The vectors are read into memory, so much less than them would be a wrong measurement; a
    # little less is what the imports had used and given back.
    assert 0.9 * VECTORS_MB < measured["added_mb"] < VECTORS_MB + 200

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from rag_radix_frontend import RetrievalReport
from rag_radix_frontend.retrieval_report import RetrievalLog


def test_reports_add_up() -> None:
    one = RetrievalReport(retrievals=1, stages=3, search_s=0.5, started=2, kept=1)
    other = RetrievalReport(retrievals=1, stages=1, search_s=0.25, wasted_tokens=7)
    assert one + other == RetrievalReport(
        retrievals=2, stages=4, search_s=0.75, started=2, kept=1, wasted_tokens=7
    )


def test_what_is_added_to_a_log_is_published_and_added_to_the_total() -> None:
    published: list[RetrievalReport] = []
    total = RetrievalLog()
    log = RetrievalLog(total, published.append)
    log.add(RetrievalReport(started=1))
    log.add(RetrievalReport(kept=1))
    RetrievalLog(total).add(RetrievalReport(started=1))
    assert published == [RetrievalReport(started=1), RetrievalReport(started=1, kept=1)]
    assert total.report == RetrievalReport(started=2, kept=1)


def test_a_total_misses_nothing_that_threads_add() -> None:
    total = RetrievalLog()

    def add(_: int) -> None:
        log = RetrievalLog(total)
        for _ in range(500):
            log.add(RetrievalReport(started=1, wasted_tokens=2))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert total.report == RetrievalReport(started=4000, wasted_tokens=8000)

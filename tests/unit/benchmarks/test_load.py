"""The client of a load where there is nobody to answer."""

from __future__ import annotations

import pytest
from rag_radix_benchmarks.completions import ask_completion
from rag_radix_benchmarks.load import LoadError, ask_generate, closed_loop, open_loop

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("ask", [ask_generate, ask_completion])
def test_a_server_that_went_away_is_named(ask):
    with pytest.raises(LoadError, match=f"{NOBODY}.*doesn't answer.*log"):
        closed_loop(NOBODY, [{}, {}], concurrency=1, ask=ask)
    with pytest.raises(LoadError, match=f"{NOBODY}.*doesn't answer.*log"):
        open_loop(NOBODY, [{}], due_s=[0.0], ask=ask)

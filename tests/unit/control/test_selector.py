"""Which documents a selector means."""

from __future__ import annotations

import pytest

from rag_radix.control.selector import Selector, parse_selector
from rag_radix.statistics import DocumentKey

PUBLIC = DocumentKey("wiki/1", "2")
SALTED = DocumentKey("wiki/1", "2", None, "secret")


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"id": "wiki/1"}, [PUBLIC, SALTED]),
        ({"id": "wiki/1", "version": "2"}, [PUBLIC, SALTED]),
        ({"id": "wiki/1", "version": ""}, []),
        ({"id": "wiki"}, []),
        ({"prefix": "wiki/"}, [PUBLIC, SALTED]),
        ({"prefix": "iki"}, []),
        ({"all": True}, [PUBLIC, SALTED]),
        ({"all": True, "namespace": ""}, [PUBLIC]),
        ({"id": "wiki/1", "namespace": SALTED.namespace}, [SALTED]),
        ({"id": "wiki/1", "namespace": "secret"}, []),
        ({"id": "wiki/1", "cache_salt": "secret"}, [SALTED]),
        ({"id": "wiki/1", "cache_salt": ""}, [PUBLIC]),
        ({"prefix": "wiki/", "cache_salt": "secret", "extra_key": "other"}, []),
    ],
)
def test_a_selector_means(body, meant):
    selector = parse_selector(body)
    assert [document for document in (PUBLIC, SALTED) if selector.matches(document)] == meant
    assert Selector(**selector.as_json()) == selector


def test_a_namespace_is_called_by_a_name_that_hides_it():
    assert PUBLIC.namespace == ""
    assert "secret" not in SALTED.namespace
    assert SALTED.namespace != DocumentKey("wiki/1", "2", "secret").namespace

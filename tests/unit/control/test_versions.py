"""A request with a newer version of a document retires the older ones, where that is asked for."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.control.listing import documents
from unit.tree.prompts import SYSTEM, document, prompt

from rag_radix.control.documents import Page
from rag_radix.control.selector import Selector
from rag_radix.control.versions import Versions
from rag_radix.statistics import DocumentKey

CONFIG = {"retire_older_versions": True}


def arrive(h, version, *, text="a", **request):
    tokens = [*SYSTEM, *document(text), 7]
    req = h.request(tokens, [("a", 20, 60)], version=version, **request)
    h.tree.control.arrived(req)
    return req


def run(h, req):
    h.admit(req)
    h.compute(req)
    h.publish(req)
    h.decode(req, 1)
    h.finish(req)
    h.check()
    return req.cached_tokens_device


def versions(h):
    return {row["version"] for row in documents(h.tree, Page())["documents"]}


def test_a_newer_version_retires_the_others_once_it_arrives():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        run(h, arrive(h, "1"))
        newer = arrive(h, "2", text="a, changed")
        assert versions(h) == set()
        assert run(h, newer) == len(SYSTEM)
        assert versions(h) == {"2"}
        assert run(h, arrive(h, "2", text="a, changed")) == len(SYSTEM) + 40


def test_what_an_older_version_computes_afterwards_is_not_kept():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        late = arrive(h, "1")
        h.admit(late)
        h.compute(late)
        run(h, arrive(h, "2", text="a, changed"))
        h.publish(late)
        h.finish(late)
        run(h, arrive(h, "1"))
        assert versions(h) == {"2"}


def test_an_older_version_that_waited_when_the_newer_one_came_is_not_kept():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        late = arrive(h, "1")
        newer = arrive(h, "2", text="a, changed")
        run(h, late)
        run(h, newer)
        assert versions(h) == {"2"}


def test_only_the_same_namespace_is_concerned():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        run(h, arrive(h, "1", extra_key="tenant"))
        run(h, arrive(h, "1"))
        run(h, arrive(h, "2", text="a, changed"))
        rows = documents(h.tree, Page())["documents"]
        assert {(row["version"], bool(row["namespace"])) for row in rows} == {
            ("1", True),
            ("2", False),
        }


def test_without_the_setting_versions_stand_side_by_side():
    with harness(device_tokens=1000) as h:
        run(h, arrive(h, "1"))
        run(h, arrive(h, "2", text="a, changed"))
        assert versions(h) == {"1", "2"}


@pytest.mark.parametrize("version", [None, "2"])
def test_a_version_that_was_invalidated_can_be_taken_back(version):
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        run(h, arrive(h, "1"))
        run(h, arrive(h, "2", text="a, changed"))
        h.tree.control.invalidate(Selector(id="a", version=version))
        run(h, arrive(h, "1"))
        assert versions(h) == {"1"}


def test_documents_without_a_version_take_no_part():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        run(h, arrive(h, ""))
        run(h, arrive(h, "1", text="a, changed"))
        run(h, arrive(h, ""))
        assert versions(h) == {"", "1"}


def test_what_is_known_is_bounded():
    known = Versions(capacity=2)
    for name in ("a", "b", "c"):
        assert not known.is_newer(DocumentKey(name, "1"))
    assert not known.is_newer(DocumentKey("a", "2"))  # forgotten
    assert known.is_newer(DocumentKey("c", "2"))
    assert known.is_older(DocumentKey("c", "1"))
    for number in range(3, 40):
        known.is_newer(DocumentKey("c", str(number)))
    assert not known.is_older(DocumentKey("c", "2"))
    assert known.is_older(DocumentKey("c", "38"))


def test_prompts_without_documents_are_none_of_its_business():
    with harness(device_tokens=1000, policy_config=CONFIG) as h:
        req = h.request(prompt("a")[0])
        h.tree.control.arrived(req)
        run(h, req)

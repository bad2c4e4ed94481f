"""What operators see of the tree."""

from __future__ import annotations

import pytest
from tree_harness import harness
from unit.control.listing import documents
from unit.tree.prompts import prompt

from rag_radix.control import documents as control_documents
from rag_radix.control import tree_view as control_tree_view
from rag_radix.control.documents import LOOK_ACTION, LOOKED_AT, ROWS_ACTION, SORTS, Page, survey
from rag_radix.control.selector import Selector
from rag_radix.control.tree_view import View, tree_view
from rag_radix.statistics import DocumentKey


def test_a_document_is_listed_once_with_its_places_hits_and_tiers():
    with harness(device_tokens=150, host_tokens=1000) as h:
        h.serve(*prompt("a", "b"), version="3")
        h.serve(*prompt("a", question=1), version="3")
        h.serve(*prompt("c", "b"))
        h.serve(*prompt("d"))
        page = documents(h.tree, Page(sort="id", descending=False))
        assert page["total"] == 5
        rows = {(row["id"], row["version"]): row for row in page["documents"]}
        a = rows["a", "3"]
        assert (a["frequency"], a["device_hits"], a["host_hits"], a["positions"]) == (2, 1, 0, 1)
        assert a["tokens"] == 40
        assert a["tier"] == "host"
        assert (a["device_tokens"], a["host_tokens"]) == (0, 40)
        assert rows["d", ""]["tier"] == "device"
        assert rows["d", ""]["priority"] > 0
        assert not a["pinned"]
        h.serve(*prompt("a", question=2), version="3")
        (a,) = documents(h.tree, Page(prefix="a"))["documents"]
        assert (a["tier"], a["host_hits"]) == ("device", 1)


def test_pages_follow_one_another_in_the_order_asked_for():
    with harness(device_tokens=4000) as h:
        for times, name in enumerate("abcde", 1):
            for question in range(times):
                h.serve(*prompt(name, question=question))

        def names(**page):
            return "".join(row["id"] for row in documents(h.tree, Page(**page))["documents"])

        assert names() == "edcba"
        assert names(descending=False) == "abcde"
        assert names(sort="id") == "edcba"
        assert names(limit=2) + names(offset=2, limit=2) + names(offset=4, limit=2) == "edcba"
        assert names(sort="tokens") == "abcde"  # all alike
        assert names(prefix="c") == "c"
        assert names(offset=9) == ""


def test_the_tree_is_shown_down_to_a_depth_and_up_to_a_size():
    with harness(device_tokens=4000) as h:
        h.serve(*prompt("a", "b"))
        h.serve(*prompt("a", "c"))
        h.serve(*prompt("d"))
        whole = tree_view(h.tree, View(depth=64, nodes=1000))
        (system,) = whole["tree"]["children"]
        assert whole["nodes"] == len(h.nodes())
        assert (system["frequency"], system["documents"], system["hidden_children"]) == (3, [], 0)
        a, d = system["children"]
        assert a["documents"] == [{"id": "a", "version": "", "tokens": 40}]
        assert [child["documents"][0]["id"] for child in a["children"]] == ["b", "c"]
        (tail,) = d["children"]
        assert tail["tail"]
        shallow = tree_view(h.tree, View(depth=2))
        (system,) = shallow["tree"]["children"]
        assert [child["hidden_children"] for child in system["children"]] == [2, 1]
        small = tree_view(h.tree, View(nodes=2))
        assert small["nodes"] == 2
        assert small["tree"]["children"][0]["hidden_children"] == 1


def test_of_siblings_the_most_used_are_shown_and_of_those_used_alike_the_oldest():
    with harness(device_tokens=6000) as h:
        order = "abcdefghij"
        for name in order:
            h.serve(*prompt(name, question=0))
        for name, times in (("h", 3), ("c", 1), ("f", 1)):
            for question in range(times):
                h.serve(*prompt(name, question=1 + question))

        def shown(nodes):
            (system,) = tree_view(h.tree, View(depth=2, nodes=1 + nodes))["tree"]["children"]
            assert system["hidden_children"] == len(order) - nodes
            return "".join(child["documents"][0]["id"] for child in system["children"])

        assert [shown(nodes) for nodes in (1, 2, 3, 5, 10)] == [
            "h",
            "hc",
            "hcf",
            "hcfab",
            "hcfabdegij",
        ]


def test_what_is_retired_isnt_shown():
    with harness(device_tokens=4000) as h:
        req = h.request(*prompt("a"))
        h.admit(req)
        h.compute(req)
        h.publish(req)
        h.tree.control.invalidate(Selector(id="a"))
        assert documents(h.tree, Page())["total"] == 0
        assert tree_view(h.tree, View())["nodes"] == 1
        h.finish(req)


def test_a_tenant_is_shown_by_itself():
    with harness(device_tokens=4000) as h:
        for salt in ("one", "two"):
            h.serve(*prompt("public", "private"), cache_salt=salt, salt_from=1)
        one = DocumentKey("", cache_salt="one").namespace

        def rows(namespace):
            found = documents(h.tree, Page(sort="id", descending=False, namespace=namespace))
            return [(row["id"], row["namespace"]) for row in found["documents"]]

        assert len(rows(None)) == 3
        assert rows(one) == [("private", one)]
        assert rows("") == [("public", "")]
        assert rows("nobody") == []
        everything, mine = (
            tree_view(h.tree, View(depth=64, nodes=1000, namespace=name))["nodes"]
            for name in (None, one)
        )
        assert everything == len(h.nodes())
        assert mine == sum(node.key.cache_salt in (None, "one") for node in h.nodes())


def test_a_page_is_looked_for_a_few_documents_at_a_time(monkeypatch):
    with harness(device_tokens=4000) as h:
        for times, name in enumerate("abcdefg", 1):
            for question in range(times):
                h.serve(*prompt(name, question=question))
        h.serve(*prompt("h"))
        h.tree.control.invalidate(Selector(id="h"))
        pages = [
            Page(sort=sort, descending=descending, offset=offset, limit=3)
            for sort in SORTS
            for descending in (True, False)
            for offset in (0, 2, 6, 9)
        ]
        at_once = [documents(h.tree, page) for page in pages]
        monkeypatch.setattr(control_documents, "LOOKED_AT", 2)
        monkeypatch.setattr(control_documents, "ROWS_AT_ONCE", 2)
        assert [documents(h.tree, page) for page in pages] == at_once
        assert at_once[0]["total"] == 7


def test_a_listing_begins_again_when_names_change_places():
    asked = survey(Page(limit=1))
    part = {"rank": 0, "known": LOOKED_AT + 1, "total": 1}
    action, body = next(asked)
    firsts = []
    for generation, name in ((1, "a"), (2, "a"), (2, "a"), (2, "b")):
        assert action == LOOK_ACTION
        firsts.append(body["first"])
        found = [[1.0, name, "", ""]]
        action, body = asked.send([{**part, "generation": generation, "found": found}])
    assert firsts == [0, LOOKED_AT, 0, LOOKED_AT]
    assert (action, body) == (ROWS_ACTION, {"0": [("a", "", "")]})
    with pytest.raises(StopIteration) as done:
        asked.send([{"rank": 0, "rows": ["row"]}])
    assert done.value.value == [{"total": 2, "offset": 0, "documents": ["row"]}]


def test_ranks_are_listed_side_by_side():
    asked = survey(Page())
    next(asked)
    parts = [
        {"rank": rank, "known": 1, "generation": 0, "total": rank, "found": found}
        for rank, found in ((1, [[1.0, "b", "", ""]]), (0, []))
    ]
    _, body = asked.send(parts)
    assert body == {"0": [], "1": [("b", "", "")]}
    with pytest.raises(StopIteration) as done:
        asked.send([{"rank": 1, "rows": ["b"]}, {"rank": 0, "rows": []}])
    assert [each["documents"] for each in done.value.value] == [[], ["b"]]


def test_of_very_many_children_the_oldest_are_shown(monkeypatch):
    with harness(device_tokens=4000) as h:
        for name in "abcd":
            h.serve(*prompt(name))
        monkeypatch.setattr(control_tree_view, "_CONSIDERED", 3)
        (system,) = tree_view(h.tree, View(depth=2))["tree"]["children"]
        assert [child["documents"][0]["id"] for child in system["children"]] == ["a", "b"]
        assert system["hidden_children"] == 2


def test_what_is_counted_of_documents_is_what_is_there():
    with harness(device_tokens=150, host_tokens=1000) as h:
        for name in "abcab":
            h.serve(*prompt(name))
        report = h.tree.report()
        nodes = h.nodes()
        assert report["nodes"] == len(nodes)
        assert report["tail_nodes"] == sum(node.is_tail for node in nodes)
        for tier, is_there in (("device", "on_device"), ("host", "backuped")):
            names = {o.document.id for n in nodes if getattr(n, is_there) for o in n.occurrences}
            assert report[tier]["documents"] == len(names)
        h.tree.reset()
        assert (h.tree.report()["nodes"], h.tree.report()["host"]["documents"]) == (0, 0)

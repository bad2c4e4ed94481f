"""Invalidated documents are found no more: which go with them, and on which tiers."""

from __future__ import annotations

import random

import pytest
from tree_harness import harness
from unit.control.listing import documents
from unit.control.retiring import POLICIES, hits, ids, invalidate, is_empty_but_for, start
from unit.tree.prompts import SYSTEM, document, prompt

from rag_radix import places
from rag_radix.control.documents import Page, chain
from rag_radix.control.selector import Selector
from rag_radix.statistics import DocumentKey


@pytest.mark.parametrize("policy", POLICIES)
def test_every_place_of_a_document_goes_with_all_below_it(policy):
    with harness(device_tokens=2000, policy=policy) as h:
        for names in (("a", "b"), ("b", "a", "c"), ("c", "b")):
            h.serve(*prompt(*names))
        removed = invalidate(h, id="b")
        assert removed.places == 3
        assert sorted(removed.paths) == [["a", "b"], ["b"], ["c", "b"]]
        assert ids(h) == {"a", "c"}
        assert h.tree.control.report()["retired_nodes"] == 0
        assert removed.in_use.nodes == 0
        assert hits(h, "a", "b") == len(SYSTEM) + 40
        assert hits(h, "b", "a", "c") == len(SYSTEM)


def test_both_tiers_are_emptied_of_it():
    with harness(device_tokens=150, host_tokens=1000) as h:
        for name in "abcdef":
            h.serve(*prompt(name))
        assert h.on_host("a")
        assert not h.on_device("a")
        assert h.on_device("f")
        before = h.tree.cache_controller.mem_pool_host.available_size()
        removed = invalidate(h, id="a")
        assert (removed.freed.device_tokens, removed.freed.host_tokens) == (0, 40)
        assert removed.freed.bytes == 40 * 2 * 4 * 4 * 2
        assert h.tree.cache_controller.mem_pool_host.available_size() == before + 40
        assert invalidate(h, prefix="").freed.device_tokens > 0
        assert h.nodes() == []
        assert h.allocator.available_size() == 150


def test_only_the_version_that_is_named_goes():
    with harness(device_tokens=1000) as h:
        h.serve(*prompt("a"), version="1")
        tokens = [*SYSTEM, *document("a2"), 7]
        h.serve(tokens, [("a", 20, 60)], version="2")
        assert invalidate(h, id="a", version="1").places == 1
        rows = documents(h.tree, Page())["documents"]
        assert [(row["id"], row["version"]) for row in rows] == [("a", "2")]


def test_a_prefix_and_a_namespace_choose_documents():
    with harness(device_tokens=2000) as h:
        h.serve(*prompt("wiki/1"))
        h.serve(*prompt("wiki/2"))
        h.serve(*prompt("blog/1"))
        h.serve(*prompt("wiki/1"), extra_key="tenant")
        rows = documents(h.tree, Page(sort="id", descending=False))["documents"]
        (tenant,) = {row["namespace"] for row in rows} - {""}
        assert "tenant" not in tenant
        assert invalidate(h, prefix="wiki/", namespace="").places == 2
        assert invalidate(h, prefix="wiki/").places == 1
        assert ids(h) == {"blog/1"}


def test_documents_that_begin_alike_keep_their_head():
    with harness(device_tokens=1000) as h:
        head = document("head")
        first = [*SYSTEM, *head, *document("x"), 7]
        second = [*SYSTEM, *head, *document("y"), 8]
        h.serve(first, [("x", 20, 100)])
        h.serve(second, [("y", 20, 100)])
        invalidate(h, id="x")
        assert ids(h) == {"y"}
        assert h.serve(second, [("y", 20, 100)]).cached_tokens_device == 100
        assert h.serve(first, [("x", 20, 100)]).cached_tokens_device == 60
        invalidate(h, id="x")
        invalidate(h, id="y")
        assert is_empty_but_for(h, 20)


def test_the_same_text_under_another_id_goes_too():
    with harness(device_tokens=1000) as h:
        ids_, _ = prompt("a")
        h.serve(ids_, [("one", 20, 60)])
        h.serve(ids_, [("two", 20, 60)])
        invalidate(h, id="one")
        assert is_empty_but_for(h, 20)


def test_more_names_of_a_text_than_are_kept_do_not_hide_it():
    with harness(device_tokens=1000) as h:
        tokens, _ = prompt("a")
        for index in range(12):
            h.serve(tokens, [(f"name {index}", 20, 60)])
        assert invalidate(h, id="name 0").places == 1
        assert is_empty_but_for(h, 20)


def test_a_document_of_which_a_part_was_computed_is_found():
    with harness(device_tokens=2000) as h:
        req = start(h, "a", chunk=40)
        h.publish(req)
        h.drop(req)
        assert invalidate(h, id="a").places == 1
        assert is_empty_but_for(h, len(SYSTEM))


def test_documents_without_a_node_of_their_own_are_found():
    with harness(device_tokens=2000, policy_config={"max_depth": 1}) as h:
        h.serve(*prompt("a", "b", "c"))
        assert invalidate(h, id="c").places == 1
        assert ids(h) == {"a"}
    with harness(device_tokens=2048, page_size=16) as h:
        tokens, _ = prompt("a", "b")
        h.serve(tokens, [("tiny", 33, 37), ("b", 60, 100)])
        assert invalidate(h, id="tiny").places == 1
        assert is_empty_but_for(h, 32)


def test_a_namespace_of_the_retired_equals_no_other():
    from rag_radix.control.retirement import RetiredNamespace

    one = RetiredNamespace("x")
    assert one != "x"
    assert "x" != one  # noqa: SIM300
    assert one != RetiredNamespace("x")
    assert len({one, "x", RetiredNamespace("x")}) == 3


def test_a_tenant_goes_with_all_that_it_has_asked():
    with harness(device_tokens=2000) as h:
        tokens, spans = prompt("public", "private")
        for salt in ("one", "two"):
            h.serve(tokens, spans, cache_salt=salt, salt_from=1)
        h.serve(range(3000, 3050), cache_salt="one")
        h.serve(*prompt("public"))
        one = DocumentKey("", cache_salt="one").namespace
        removed = invalidate(h, prefix="", namespace=one)
        assert (removed.places, removed.in_use.nodes) == (2, 0)
        assert {node.key.cache_salt for node in h.nodes()} == {None, "two"}
        assert ids(h) == {"public", "private"}
        assert h.serve(range(3000, 3050), cache_salt="one").cached_tokens_device == 0
        assert h.serve(tokens, spans, cache_salt="one", salt_from=1).cached_tokens_device == 60


def test_what_stands_behind_a_public_document_goes_with_it_for_every_tenant():
    with harness(device_tokens=2000) as h:
        for salt in ("one", "two"):
            h.serve(*prompt("public", "private"), cache_salt=salt, salt_from=1)
        assert invalidate(h, id="public", namespace="").places == 1
        assert is_empty_but_for(h, 20)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_document_without_a_node_goes_when_its_name_is_forgotten(is_cut):
    with harness(device_tokens=1000, page_size=16) as h:
        for number in range(20):
            h.serve(range(64), [(f"d{number}", 20, 28)], output=())
        if is_cut:  # behind the document
            h.serve([*range(32), *document("other")], output=())
        assert invalidate(h, id="d0").places == 1
        assert h.serve(range(64)).cached_tokens_device == 16


def test_a_head_stays_when_names_of_documents_that_end_below_it_are_forgotten():
    with harness(device_tokens=1000) as h:
        for number in range(20):
            h.serve([*SYSTEM, *range(40)], [(f"d{number}", 20, 60)], output=())
        h.serve([*SYSTEM, *range(10), *document("e")], [("e", 20, 70)], output=())
        assert invalidate(h, id="unknown").places == 1
        assert ids(h) == {"e"}


def _tops_by_looking_through_all(h, selector):
    """What goes, by its definition."""
    named, kept = [], set()
    for node in filter(h.tree.control.reaches, h.nodes()):
        if node.names_forgotten or any(map(selector.matches, node.unmarked_documents)):
            named.append([node])
        goes = node.names_forgotten or any(selector.matches(o.document) for o in node.occurrences)
        for occurrence in node.occurrences:
            if goes:
                named.append(chain(node, occurrence))
            else:
                kept.update(each.id for each in chain(node, occurrence))
    tops = {next((n for n in nodes if n.id not in kept), nodes[-1]).id for nodes in named}
    return {
        top for top in tops if not any(n.id in tops for n in h.tree.tree_core.path_to(top)[:-1])
    }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_goes_is_found_without_looking_through_all(seed, page_size):
    rng = random.Random(seed)
    texts = [document(f"t{n}", rng.choice([10, 24, 40])) for n in range(6)]
    texts += [[*text[:20], *document(f"u{n}", 24)] for n, text in enumerate(texts)]
    config = {"max_depth": rng.choice([None, 2])}
    with harness(
        device_tokens=900, host_tokens=600, page_size=page_size, policy_config=config
    ) as h:
        for _ in range(60):
            tokens, spans = list(SYSTEM), []
            for number in rng.choices(range(len(texts)), k=rng.randint(1, 4)):
                # Some texts have many names, some names many texts.
                name = f"{number % rng.choice([3, 7])}/{rng.randint(0, 9) if number < 2 else 0}"
                spans.append((name, len(tokens), len(tokens) + len(texts[number])))
                tokens += texts[number]
            salt = rng.choice([None, None, "a"])
            salt_from = None if salt is None else rng.randint(0, len(spans))
            request = {"chunk": rng.choice([None, 32]), "version": rng.choice("12")}
            h.serve([*tokens, 5], spans, cache_salt=salt, salt_from=salt_from, **request)
            if rng.random() < 0.4:
                id_ = f"{rng.randint(0, 6)}/{rng.randint(0, 9)}"
                selector = rng.choice(
                    [
                        Selector(id=id_),
                        Selector(id=id_, version="1"),
                        Selector(id=id_, namespace=""),
                        Selector(prefix=id_[:2]),
                    ]
                )
                expected = _tops_by_looking_through_all(h, selector)
                retirement = h.tree.control._retirement
                assert {top.id for top in retirement._find(selector)} == expected
                assert h.tree.control.invalidate(selector).places == len(expected)
                h.check()


def test_an_index_of_which_most_is_live_is_not_made_again_for_each_name(monkeypatch):
    monkeypatch.setattr(places, "_FEWEST", 16)
    with harness(device_tokens=2000) as h:
        index = h.tree.tree_core.places
        for alias in range(7):
            for number in range(10):
                tokens = [*SYSTEM, *document(f"t{number}")]
                h.serve(tokens, [(f"{number}/{alias}", 20, 60)], output=())
        assert index._entries > 3 * len(h.nodes())
        generation = index.generation
        for number in range(10):
            h.serve([*SYSTEM, *document(f"t{number}")], [(f"{number}/8", 20, 60)], output=())
        assert index.generation - generation <= 1


def test_the_index_of_documents_does_not_grow_with_what_has_left(monkeypatch):
    monkeypatch.setattr(places, "_FEWEST", 64)
    with harness(device_tokens=300) as h:
        for number in range(200):
            h.serve(*prompt(f"d{number}"))
            h.tree.tree_core.forget_names(h.ends()[f"d{number}"])
        index = h.tree.tree_core.places
        assert index._entries <= 64 + 3 * len(h.nodes())
        assert len(index._by_document) + len(index._unknown) <= index._entries
        name = next(iter(ids(h)))
        assert invalidate(h, id=name).places >= 1

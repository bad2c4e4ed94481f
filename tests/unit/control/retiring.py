"""Invalidating documents of a tree, and what is found of them afterwards."""

from __future__ import annotations

from unit.control.listing import documents
from unit.tree.prompts import prompt

from rag_radix.control.documents import Page
from rag_radix.control.selector import Selector

POLICIES = ["pgdsf", "pgdsf-plus"]


def invalidate(h, **selector):
    removed = h.tree.control.invalidate(Selector(**selector))
    h.check()
    return removed


def start(h, *names, chunk=None, **request):
    req = h.request(*prompt(*names), **request)
    h.admit(req)
    h.compute(req, chunk)
    return req


def end(h, req):
    h.decode(req, 1)
    h.finish(req)
    h.check()


def hits(h, *names, **request):
    """Tokens that a prompt finds; it is served."""
    req = h.serve(*prompt(*names, question=99), **request)
    return req.cached_tokens_device + req.cached_tokens_host


def ids(h):
    return {row["id"] for row in documents(h.tree, Page(limit=1000))["documents"]}


def is_empty_but_for(h, tokens):
    return sum(len(node.key) for node in h.nodes()) == tokens

"""What a retrieval counts for: the nodes that it has read, its documents, and what they cost."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from rag_radix.history import Kind, PathHistory
from rag_radix.retrieval import Retrieval
from rag_radix.sglang_compat import time_counter

if TYPE_CHECKING:
    from rag_radix.knowledge_tree import KnowledgeTree
    from rag_radix.node import DocumentNode


class Counting:
    """Counts requests on the nodes of a tree, each node once for a request."""

    def __init__(self, tree: KnowledgeTree) -> None:
        self._tree = tree

    def count(self, retrieval: Retrieval, path: list[tuple[DocumentNode, int]]) -> None:
        """Count the nodes of `path` that belong to the prompt and aren't counted yet, or have
        left the tree since.

        Args:
            path: The path's nodes, each with the prompt position where it ends.
        """
        uncounted, outputs = [], []
        for node, end in path:
            start = end - node.statistics.tokens
            if end > retrieval.prompt_tokens:
                outputs.append((node, start))
            elif start >= retrieval.counted_end or node.creation_time > retrieval.counted_at:
                uncounted.append((node, start, end))
        if uncounted or not retrieval.counted:
            self._count_prompt(retrieval, uncounted)
        for node, start in outputs:
            self._note_output(node, start)
        retrieval.counted_at = time_counter()
        if retrieval.inserted_end >= self._tree.page_floor(retrieval.prompt_tokens):
            # Those that share their only page with the end of the prompt, too.
            self.count_documents(retrieval, retrieval.prompt_tokens)

    def _count_prompt(
        self, retrieval: Retrieval, nodes: list[tuple[DocumentNode, int, int]]
    ) -> None:
        """Count the request, if it isn't yet, and `nodes`, each with its place in the prompt."""
        tree = self._tree
        core, policy = tree.tree_core, tree.settings.policy
        hit = retrieval.hits.total
        new_tokens = max(retrieval.prompt_tokens - hit, 1)
        cost = tree.settings.prefill_cost(hit, new_tokens)
        if not retrieval.counted:
            self._count_request(retrieval, cost)
        starts = [start for start, _ in tree.kept_bounds(retrieval)]
        for node, start, end in nodes:
            statistics = node.statistics
            statistics.frequency += 1
            statistics.last_access = core.access_time
            self.count_documents(retrieval, end - 1)
            index = bisect_right(starts, start) - 1
            if index >= 0 and end <= retrieval.kept_documents[index].end:
                statistics.document_frequency = max(
                    statistics.document_frequency, retrieval.document_counts[index]
                )
            if policy.uses_history:
                self._note_history(node, retrieval.histories[index] if index >= 0 else None)
            if end > hit:
                statistics.add_cost(cost, new_tokens)
            elif statistics.cost_samples == 0:
                self._add_cost_alone(node, start)  # computed by a request that didn't count
            core.rank(node)
            retrieval.counted_end = max(retrieval.counted_end, end)

    def _count_request(self, retrieval: Retrieval, cost: float) -> None:
        """Count the request, whose prefill took `cost` seconds."""
        tree = self._tree
        retrieval.counted = True
        if tree.recorder is not None:
            retrieval.counted_at_s = tree.recorder.now_s()
        now = tree.tree_core.advance()
        if tree.settings.policy.uses_history:
            tree.histories.model.advance(now)
            self._note_topic(retrieval, now)
        counters, hits = tree.counters, retrieval.hits
        counters.requests += 1
        counters.prompt_tokens += retrieval.prompt_tokens
        counters.device_hit_tokens += hits.device
        counters.host_hit_tokens += hits.host
        counters.storage_hit_tokens += hits.storage
        if hits.total:
            whole = tree.settings.prefill_cost(0, retrieval.prompt_tokens)
            counters.saved_prefill_s += max(whole - cost, 0.0)

    def _note_topic(self, retrieval: Retrieval, now: int) -> None:
        tree = self._tree
        if retrieval.kept_documents:
            # By name, so that an earlier server's topics are known again.
            documents = [
                retrieval.document_key(i).name for i in range(len(retrieval.kept_documents))
            ]
            retrieval.topic = tree.histories.use_topic(documents, retrieval.keys[0], now)

    def _note_history(self, node: DocumentNode, above: PathHistory | None) -> None:
        """Give `node` the history of the last document that begins `above` its end or, for
        what prompts begin with and for tails, one of its own."""
        tree = self._tree
        statistics = node.statistics
        if above is not None and not node.is_tail:
            statistics.history = above
        else:
            kind = Kind.TAIL if node.is_tail else Kind.PREFIX
            statistics.history = tree.histories.record_unnamed(
                statistics.history, kind, tree.tree_core.access_time
            )

    def _note_output(self, node: DocumentNode, start: int) -> None:
        """Let a policy see what an output would cost as part of a later prompt."""
        tree = self._tree
        if node.statistics.cost_samples == 0:
            self._add_cost_alone(node, start)
            if tree.settings.policy.uses_history:
                self._note_history(node, None)
            tree.tree_core.rank(node)

    def _add_cost_alone(self, node: DocumentNode, start: int) -> None:
        tree = self._tree
        tokens = node.statistics.tokens
        node.statistics.add_cost(tree.settings.prefill_cost(start, tokens), tokens)

    def count_documents(self, retrieval: Retrieval, position: int) -> None:
        """Count the documents that begin up to `position` and aren't counted yet."""
        tree = self._tree
        bounds = retrieval.bounds(tree.tree_core.page_size)
        hits, counts = retrieval.hits, retrieval.document_counts
        for index in range(len(counts), len(bounds)):
            start, end = bounds[index]
            if start > position:
                return
            span = retrieval.annotation.documents[index]
            if end <= span.start:
                end = span.end  # it lies within a page, which belongs to what follows
            document = retrieval.document_key(index)
            counts.append(tree.document_frequencies.record(document))
            if tree.settings.policy.uses_history and index < len(retrieval.kept_documents):
                assert retrieval.topic is not None
                retrieval.histories.append(
                    tree.histories.record(
                        retrieval.keys[index],
                        retrieval.topic,
                        tree.tree_core.access_time,
                        is_first=index == 0,
                    )
                )
            tree.counters.documents += 1
            if end <= hits.device:
                tree.counters.device_hit_documents += 1
                tree.document_frequencies.record_hit(document, on_host=False)
            elif end <= hits.total:
                tree.counters.host_hit_documents += 1
                tree.document_frequencies.record_hit(document, on_host=True)

"""Retrieval and generation overlapped for OpenAI-style clients.

Dynamic speculative pipelining after RAGCache (arXiv:2404.12457, section 5.3), as programs have it
with `rag_retrieve()`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rag_radix_frontend.chat_server import ChatServer
from rag_radix_frontend.chat_speculation import ChatSpeculation
from rag_radix_frontend.document import Document
from rag_radix_frontend.errors import ArgumentError, RetrievalError
from rag_radix_frontend.messages import annotate
from rag_radix_frontend.ordering import text_identity
from rag_radix_frontend.processes import PerProcess
from rag_radix_frontend.retrieval_report import RetrievalLog, RetrievalReport
from rag_radix_frontend.retriever import Retriever, ScoredDocument, Stage

Messages = Sequence[Mapping[str, Any]]
BuildMessages = Callable[[Sequence[Document]], Messages]

_SEARCH_THREADS = 64

# Errors that say something else where a coroutine or a future raises them.
_AMBIGUOUS = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)

# To send a guess and to end it takes up to 2 ms of CPU time, so it is only sent when it has stood
# for so long, or for as long as the search had taken by then.
_LONGEST_PAUSE_S = 0.002

_servers: weakref.WeakKeyDictionary[Any, dict[asyncio.AbstractEventLoop, ChatServer]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class RetrievedAnswer:
    """An answer and what it is founded on.

    Attributes:
        documents: The documents in its messages.
        completion: What `client.chat.completions.create` returns; with `stream=True` an
            asynchronous iterator of chunks.
    """

    documents: tuple[ScoredDocument, ...]
    completion: Any
    _log: RetrievalLog = field(repr=False, compare=False)

    @property
    def retrieval(self) -> RetrievalReport:
        """What the retrieval took, and what became of the requests made ahead of it, as of now:
        wrong guesses end in the background, and what they computed is known once they have."""
        return self._log.report


async def retrieve_and_generate(
    client: Any,
    retriever: Retriever,
    query: str,
    build_messages: BuildMessages,
    *,
    k: int = 2,
    speculative: bool = True,
    strict: bool = False,
    public: bool = False,
    **options: Any,
) -> RetrievedAnswer:
    """Retrieve documents and have a chat completion written from them.

        answer = await retrieve_and_generate(
            AsyncOpenAI(base_url="http://localhost:30000/v1", api_key="none"),
            retriever, "How do I return a parcel?",
            lambda documents: [
                {"role": "system", "content": "\\n\\n".join(d.text for d in documents)},
                {"role": "user", "content": "How do I return a parcel?"},
            ],
            model="default", max_tokens=64,
        )
        print(answer.completion.choices[0].message.content)

    While the retriever searches, the completion for the documents found so far is already being
    written, as long as the server has room. If they are the final ones, it is the answer;
    otherwise it is ended. What the next stage replaces within 2 ms isn't asked for. All of a search
    runs on one thread.

    Args:
        client: An `openai.AsyncOpenAI`, or what has its interface. One that has nothing but an
            address, a key and headers of its own doesn't send the requests ahead itself.
        retriever: Finds the documents.
        query: What they are to fit.
        build_messages: Makes the messages; it quotes all documents, in the order given, and
            depends on nothing else, since it is called for provisional documents, too.
        k: How many documents.
        speculative: Whether to ask ahead of the final documents.
        strict: As for `annotate`.
        public: The documents are, and all of the messages before the last of them: a `cache_salt`
            in `extra_body` covers only what follows.
        options: For `client.chat.completions.create`.

    Raises:
        ArgumentError: k or retriever can't work, or messages don't quote the documents.
        RetrievalError: The retriever ended without a final stage, or raised what would end the
            caller in another way than an error.
    """
    if not isinstance(retriever, Retriever):
        raise ArgumentError(f"{retriever!r} is no retriever: it has no retrieve(query, k)")
    if not isinstance(k, int) or k < 1:
        raise ArgumentError(f"k must be a whole number of at least 1, not {k!r}")
    server = _server_of(client)
    log = RetrievalLog(server.log)
    # Several samples are several requests at the server, which can't be aborted.
    speculative = speculative and options.get("n") in (None, 1)
    started_s = time.perf_counter()
    guess: ChatSpeculation | None = None
    found: list[tuple[str, str, str]] = []
    stages = 0

    def request_for(stage: Stage) -> dict[str, Any]:
        documents = [scored.document for scored in stage.documents]
        return _request(build_messages, documents, strict, public, options)

    async def ask() -> Any:
        return await client.chat.completions.create(**request)

    try:
        async with contextlib.aclosing(_stages(retriever, query, k)) as stages_found:
            async for stage in stages_found:
                stages += 1
                before, found = found, [text_identity(scored) for scored in stage.documents]
                is_same = found == before
                if guess is not None and not is_same:
                    guess.discard()
                    guess = None
                if stage.final:
                    break
                if speculative and found and not is_same:
                    # Messages may not be made for documents that aren't in the result.
                    with contextlib.suppress(Exception):
                        request = request_for(stage)
                        pause_s = min(_LONGEST_PAUSE_S, time.perf_counter() - started_s)
                        guess = ChatSpeculation(server, request, log, pause_s)
        ended_s = time.perf_counter()
        search_s = ended_s - started_s
        log.add(
            RetrievalReport(
                retrievals=1, stages=stages, search_s=search_s, search_not_overlapped_s=search_s
            )
        )
        request = request_for(stage)
        # Metadata doesn't count as a change of the documents, but may be in the messages.
        if guess is not None and guess.messages != request["messages"]:
            guess.discard()
            guess = None
        if guess is not None and await guess.promote(ended_s):
            if options.get("stream"):
                completion = _chunks(guess, ask)
                guess = None
                return RetrievedAnswer(stage.documents, completion, log)
            # If it has failed after all, it is asked for in the ordinary way, with its retries.
            with contextlib.suppress(Exception):
                completion = await guess.result()
                guess = None
                return RetrievedAnswer(stage.documents, completion, log)
    finally:
        if guess is not None:
            guess.discard()
    return RetrievedAnswer(stage.documents, await ask(), log)


async def _chunks(kept: ChatSpeculation, ask: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    """The chunks of a stream that was asked for ahead. If it fails before the first one, they are
    those of a stream that is asked for in the ordinary way."""
    has_begun = False
    try:
        async with contextlib.aclosing(kept.chunks()) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield chunk
            return
    except Exception:
        if has_begun:
            raise
    async with await ask() as stream:
        async for chunk in stream:
            yield chunk


def chat_retrievals(client: Any) -> RetrievalReport:
    """What all retrievals for this client took in the running event loop."""
    return _server_of(client).log.report


def _request(
    build_messages: BuildMessages,
    documents: Sequence[Document],
    strict: bool,
    public: bool,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    messages = build_messages(documents)
    extra = options.get("extra_body") or {}
    salt = extra.get("cache_salt")
    salt_from = len(documents) if salt and public else None
    own = annotate(messages, documents, strict=strict, cache_salt=salt, salt_from=salt_from)
    custom = {**(extra.get("custom_params") or {}), **own["custom_params"]}
    return {
        **options,
        "messages": messages,
        "extra_body": {**extra, "custom_params": custom},
    }


def _server_of(client: Any) -> ChatServer:
    loop = asyncio.get_running_loop()
    servers = _servers.setdefault(client, {})
    if loop not in servers:
        for other in list(servers):
            if other.is_closed():
                del servers[other]
        servers[loop] = ChatServer(client)
    return servers[loop]


async def _stages(retriever: Retriever, query: str, k: int) -> AsyncGenerator[Stage, None]:
    """The stages of a search, the last of which is final.

    The search is on one thread from its beginning to its end, since what it opens may belong to
    that thread. When nobody takes its stages any more, it ends at the next one.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Stage | Exception] = asyncio.Queue()
    is_left = False

    def hand_over(what: Stage | Exception) -> None:
        nonlocal is_left
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, what)
        except RuntimeError:  # The loop is closed.
            is_left = True

    def search() -> None:
        if is_left:  # while all threads were busy
            return
        try:
            for stage in retriever.retrieve(query, k):
                if is_left:
                    return
                hand_over(stage)
                if stage.final:
                    return
            raise RetrievalError(f"{type(retriever).__name__} ended without a final stage")
        except BaseException as error:
            hand_over(_as_ordinary(error, retriever))

    try:
        _THREADS.pool.submit(search)
        while not isinstance(it := await arrived.get(), Exception):
            yield it
        raise it
    finally:
        is_left = True


def _as_ordinary(error: BaseException, retriever: Retriever) -> Exception:
    if isinstance(error, Exception) and not isinstance(error, _AMBIGUOUS):
        return error
    ordinary = RetrievalError(f"{type(retriever).__name__} raised {error!r}")
    ordinary.__cause__ = error
    return ordinary


class _Threads(PerProcess):
    """Threads for searches: more than asyncio's own, which are as few as the cores, since a search
    may be all waiting."""

    def _begin(self) -> None:
        self.pool = ThreadPoolExecutor(_SEARCH_THREADS, thread_name_prefix="rag-search")


_THREADS = _Threads()

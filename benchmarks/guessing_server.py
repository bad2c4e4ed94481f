"""A server without a model, in a process of its own: what the clients of rag-radix need of one.

Prints its port. Answers everything, after as long as `--answer-ms` says or until it is aborted.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()
answer_s = 0.0
unanswered: dict[str, asyncio.Event] = {}


async def _reason(rid: str) -> str:
    aborted = unanswered[rid] = asyncio.Event()
    try:
        await asyncio.wait_for(aborted.wait(), answer_s)
    except TimeoutError:
        return "stop"
    finally:
        del unanswered[rid]
    return "abort"


@app.get("/get_model_info")
async def model_info() -> Any:
    return {"model_path": "none"}


@app.get("/rag/pool")
async def pool() -> Any:
    return {"waiting": 0, "max_prefill_bs": 4, "accepts": True}


@app.post("/rag/promote")
async def promote(request: Request) -> Any:
    return {"rids": dict.fromkeys((await request.json())["rids"], "running")}


@app.post("/abort_request")
async def abort(request: Request) -> None:
    if (aborted := unanswered.get((await request.json())["rid"])) is not None:
        aborted.set()


@app.post("/generate")
async def generate(request: Request) -> Any:
    body = await request.json()
    counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    return {
        "text": "yes",
        "meta_info": {"finish_reason": {"type": await _reason(body["rid"])}, **counts},
    }


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Any:
    body = await request.json()
    reason = await _reason(body.get("rid", ""))
    message = {"role": "assistant", "content": "yes"}
    return {
        "id": "0",
        "object": "chat.completion",
        "created": 0,
        "model": "none",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answer-ms", type=float, required=True)
    global answer_s
    answer_s = parser.parse_args().answer_ms / 1e3
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


if __name__ == "__main__":
    main()

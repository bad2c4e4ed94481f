"""The ASGI app of the HTTP workers that `--tokenizer-worker-num` starts.

SGLang loads no plugins in these processes; its `SGLANG_HTTP_SERVER_APP_PATH` names the app they
import, and this one loads the plugins first. `rag_radix.door` sets it.
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app
from sglang.srt.plugins import load_plugins

load_plugins()

__all__ = ["app"]

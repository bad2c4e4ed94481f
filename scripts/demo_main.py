"""Retrieval-augmented answers from a real model whose server keeps what it has read.

A GPU tier of a few prompts makes the knowledge tree work: documents move to the host tier and
come back, and what each question really cost is shown.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from demo_corpus import write_corpus
from demo_progress import progress
from demo_report import Answer, show_answer, show_stats, show_summary
from demo_server import Server, ServerError
from prepare_model import prepare_model
from rag_radix_frontend.errors import FrontendError

if TYPE_CHECKING:
    from demo_ask import Assistant

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".cache" / "demo"

# Several share their documents: some at once, some after the GPU tier has let go of them.
QUESTIONS = (
    "What does the assert statement do?",
    "What does the break statement do in a loop?",
    "What is a lambda used for?",
    "What is a context manager used for?",
    "What happens to the else clause when break leaves a loop?",
    "What is a boolean?",
    "What is an assert statement used for?",
    "When do I use a context manager?",
    "How do I delete a variable?",
    "What is a boolean value?",
)

# Three to four prompts of the demo fit into the GPU tier; the host tier holds four times that.
SERVER_FLAGS = (
    "--max-total-tokens",
    "2500",
    "--hicache-ratio",
    "4",
    "--context-length",
    "2048",
    "--max-running-requests",
    "4",
    "--log-level",
    "info",
)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    question: str | None
    chat: bool
    keep: bool


def main() -> int:
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ServerError, FrontendError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="./scripts/demo", description=__doc__)
    parser.add_argument("--question", metavar="TEXT", help="ask this one instead of the ten")
    parser.add_argument("--chat", action="store_true", help="keep asking until end of input")
    parser.add_argument("--keep", action="store_true", help="leave the server running")
    return Options(**vars(parser.parse_args(arguments)))


def leave(number: int, frame: FrameType | None) -> None:
    """Signal handler: unwind, so that what was started is stopped."""
    raise SystemExit(128 + number)


def run(options: Options) -> int:
    model = prepare_model()
    index = prepare_index(model)
    server = Server.start(["--model-path", str(model), *SERVER_FLAGS], DEMO / "server.log")
    kept = False
    try:
        with progress("Loading the encoder and the index"):
            # Imported here since it takes seconds, in which the server loads as well.
            from demo_ask import Assistant, open_index

            retriever = open_index(index)
        with progress("Waiting for the server"):
            server.wait_ready()
        answers = ask_all(Assistant(server.url, retriever), server, options)
        finish(answers, server, options, model)
        kept = options.keep
    finally:
        if not kept:
            # A second Ctrl-C must not leave half of the processes behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with progress("Stopping the server"):
                server.stop()
    return 0


def ask_all(assistant: Assistant, server: Server, options: Options) -> list[Answer]:
    """Ask every question and show each answer as it is complete."""
    answers: list[Answer] = []
    for question in questions(options):
        try:
            with progress("Answering"):
                answers.append(assistant.ask(question))
        except Exception as error:
            if server.has_ended():
                raise ServerError(f"the server has ended\n{server.log_tail()}") from error
            raise
        show_answer(len(answers), answers[-1])
    return answers


def prepare_index(model: Path) -> Path:
    """The index of the demo's documents, built when there is none or they have changed."""
    from tokenizers import Tokenizer

    DEMO.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    corpus, fresh, index = DEMO / "corpus.jsonl", DEMO / "corpus.new.jsonl", DEMO / "index"
    count = write_corpus(fresh, lambda text: len(tokenizer.encode(text).ids))
    if index.exists() and corpus.exists() and corpus.read_bytes() == fresh.read_bytes():
        fresh.unlink()
        return index
    print(f"Indexing {count} documents (once)", file=sys.stderr, flush=True)
    command = ["rag-radix", "index", "build", str(fresh), "--out", str(index), "--overwrite"]
    command[0] = str(Path(sys.executable).parent / command[0])
    with progress("Indexing"):
        built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{built.stdout}{built.stderr}")
    fresh.replace(corpus)
    return index


def questions(options: Options) -> Iterator[str]:
    """The questions to ask, those of a chat as they are typed."""
    if options.question:
        yield options.question
    if options.chat:
        print("\nAsk about Python; an empty line ends.")
        while question := read_question():
            yield question
    elif not options.question:
        yield from QUESTIONS


def read_question() -> str:
    try:
        return input("\n? ").strip()
    except EOFError:
        return ""


def finish(answers: Sequence[Answer], server: Server, options: Options, model: Path) -> None:
    """Print the summary, and how to go on."""
    if len(answers) > 1:
        show_summary(answers)
    if answers:
        import torch  # loaded by SGLang already

        show_stats(server.stats(), has_gpu=torch.cuda.is_available())
    print("\nNext")
    if options.keep:
        print(f"    the server runs on at {server.url}, log in {server.log}")
        print(f"    curl {server.url}/rag/stats")
        print(f"    kill -- -{server.pid}    stops it")
    print('    ./scripts/demo --question "What does the with statement do?"')
    print("    ./scripts/demo --chat")
    print("    ./scripts/demo --keep    leaves the server running")
    print(f"    .venv/bin/rag-radix serve --model-path {model.relative_to(ROOT)}")
    print("    README.md has a program to ask it with; this demo's index is .cache/demo/index")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

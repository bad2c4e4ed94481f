"""What our scheduling policy and prefill batch rely on; each test fails when SGLang changes it."""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_policy as stock
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import load_inquirer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from rag_radix import schedule_policy, waiting_queue
from rag_radix.errors import IncompatibleSGLangError
from rag_radix.sglang_compat import surface_problems


def test_what_is_overridden_and_called_takes_what_it_took():
    assert surface_problems(schedule_policy.SURFACE) == []


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (schedule_policy.KnowledgeSchedulePolicy, stock.SchedulePolicy),
        (schedule_policy.KnowledgePrefillAdder, stock.PrefillAdder),
    ],
)
def test_every_method_we_override_is_on_the_checked_list(ours, base):
    overridden = {
        name
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and name in vars(base)
    }
    listed = {
        target.rpartition(".")[2]
        for target in schedule_policy.SURFACE
        if target.partition(":")[2].startswith(f"{base.__name__}.")
    }
    # The adder's arguments are only passed on.
    assert overridden - {"__init__"} <= listed


def test_a_changed_method_stops_the_start(monkeypatch):
    monkeypatch.setattr(stock.PrefillAdder, "add_one_req", lambda self, req: None)
    with pytest.raises(IncompatibleSGLangError, match="add_one_req takes"):
        schedule_policy.install(SimpleNamespace())


def test_a_pass_orders_its_queue_in_place_and_asks_the_prefill_batch_for_each_in_turn():
    source = inspect.getsource(Scheduler._get_new_batch_prefill_raw)
    steps = [
        "self.policy.calc_priority(\n            self.waiting_queue,",
        "adder = self.get_prefill_adder_class()(",
        "self.chunked_req = adder.add_chunked_req(self.chunked_req)",
        "for req in self.waiting_queue:",
        "req.init_next_round_input(self.tree_cache)",
        "res = adder.add_one_req(",
        "if res != AddReqResult.CONTINUE:",
        "can_run_list: List[Req] = adder.can_run_list",
        "self.waiting_queue = [x for x in self.waiting_queue if x not in can_run_set]",
    ]
    places = [source.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def test_the_batch_in_flight_is_where_it_is_looked_for():
    source = inspect.getsource(Scheduler.event_loop_overlap)
    assert "self.result_queue.append((batch.copy(), batch_result))" in source
    copied = inspect.getsource(ScheduleBatch.copy)
    assert "reqs=self.reqs[:]" in copied
    assert "forward_mode=self.forward_mode" in copied
    for name in ("chunked_req", "policy", "schedule_policy"):
        assert f"self.{name}" in inspect.getsource(Scheduler)


def test_stocks_policy_keeps_what_ours_is_made_from():
    source = inspect.getsource(stock.SchedulePolicy.__init__)
    for name in (
        "tree_cache",
        "enable_hierarchical_cache",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "priority_sign",
    ):
        assert f"self.{name} = " in source
    assert {"CONTINUE", "OTHER"} <= set(stock.AddReqResult.__members__)


def test_requests_have_what_the_queue_reads_and_sets():
    req = Req("0" * 32, "", array("q", [1, 2, 3]), SamplingParams(), vocab_size=9)
    for name in (
        "cache_salt",
        "extra_key",
        "host_hit_length",
        "num_matched_prefix_tokens",
        "output_ids",
        "positional_embed_overrides",
        "prefix_len",
        "priority",
        "seqlen",
        "skip_radix_cache_insert",
    ):
        assert hasattr(req, name)
    assert hash(req) == hash(req)
    assert not req.finished()
    assert req._compute_max_prefix_len(3) == 2


def test_the_load_report_reads_what_the_queue_sets():
    source = inspect.getsource(load_inquirer)
    assert "matched = req.num_matched_prefix_tokens" in source


def test_the_defaults_are_those_that_ours_stand_beside():
    assert ServerArgs(model_path="unresolved").schedule_policy == schedule_policy._STOCK_DEFAULT
    threshold = stock.IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD
    assert threshold == waiting_queue._WORTH_WAITING_TOKENS

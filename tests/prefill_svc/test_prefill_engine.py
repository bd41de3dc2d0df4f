"""The prefill engine, case by case."""

from typing import Any

import pytest

from common.sampling import SamplingParams
from prefill_svc.request import Cancel, PrefillRequest
from tests.prefill_svc.harness import PrefillHarness

GREEDY = SamplingParams(temperature=0.0)


def request(number: int = 1, length: int = 10, **fields: Any) -> PrefillRequest:
    values: dict[str, Any] = {
        "peer": "d",
        "transfer_id": number,
        "request_id": f"r{number}",
        "prompt_ids": tuple(range(length)),
        "first_token": 0,
        "first_choices": (0,),
        "params": GREEDY,
        "cache_salt": "",
        "traceparent": "",
    }
    return PrefillRequest(**(values | fields))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(length=0), "a prompt of 0 tokens"),
        (request(length=41), "a prompt of 41 tokens; this worker holds 1 to 40"),
        (request(length=4, first_token=4), "first_token 4"),
    ],
)
def test_what_can_never_be_served_is_rejected_at_once(bad: PrefillRequest, words: str) -> None:
    harness = PrefillHarness(max_prompt_tokens=40)
    told = harness.run(bad)
    assert told.ended is not None and told.ended.outcome == "rejected" and words in told.ended.message
    harness.finish()


def test_a_transfer_id_that_is_in_use_is_rejected_and_its_user_goes_on() -> None:
    harness = PrefillHarness()
    first = harness.run(request())
    harness.step()
    second = harness.run(request(peer="other"))
    assert second.ended is not None and second.ended.outcome == "rejected"
    third = harness.run(request())
    assert third.ended is not None and third.ended.outcome == "rejected"
    harness.told = {("d", 1): first}
    harness.finish()
    assert first.ended is not None and first.ended.outcome == "ok"


def test_chunks_progress_and_first_token_in_order() -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(request(length=10, first_choices=(0, 2)))
    for tokens_done in ([4], [4, 8], [4, 8]):
        assert told.outcome() is None
        harness.step()
        assert told.progress == tokens_done
    assert told.first is not None and [choice for choice, _ in told.first] == [0, 2]
    assert told.outcome() is None, "its KV is still on its way"
    harness.finish()
    assert told.ended is not None
    assert (told.ended.outcome, told.ended.cached_tokens, told.ended.computed_tokens) == ("ok", 0, 10)
    assert harness.engine.snapshot.figures.tokens_computed == 10


def test_a_replay_wants_kv_and_no_token() -> None:
    harness = PrefillHarness()
    told = harness.run(request(first_choices=()))
    harness.finish()
    assert told.first is None and told.ended is not None and told.ended.outcome == "ok"
    assert [chunk.wants_logits for call in harness.runner.calls for chunk in call] == [False]


def test_the_cached_part_is_sent_and_not_computed() -> None:
    harness = PrefillHarness()
    harness.run(request(1, 12))
    harness.finish()
    told = harness.run(request(2, 14))
    harness.step()
    send = harness.transfer.sends[2]
    assert sorted(send.ends.values()) == [12, 14] and send.closed
    harness.finish()
    assert told.ended is not None
    assert (told.ended.cached_tokens, told.ended.computed_tokens, told.ended.messages) == (12, 2, 14)


@pytest.mark.parametrize(
    ("first_token", "chunks"), [(0, [8, 10]), (5, [8, 10]), (8, [10]), (9, [10])], ids=["all", "mid", "edge", "last"]
)
def test_only_what_the_peer_does_not_hold_is_sent(first_token: int, chunks: list[int]) -> None:
    harness = PrefillHarness()
    harness.run(request(1, 8, prompt_ids=tuple(range(9))))
    harness.finish()
    harness.run(request(2, 10, first_token=first_token))
    harness.step()
    send = harness.transfer.sends[2]
    assert sorted(send.ends.values()) == chunks and len(send.slots) == 10 - first_token
    harness.finish()


def test_each_layer_is_announced_while_the_next_is_computed() -> None:
    harness = PrefillHarness()
    seen: list[dict[int, int]] = []
    announce = harness.transfer.layers_ready

    def spy(chunk_ids: list[int], num_layers_done: int, event: Any = None) -> None:
        announce(chunk_ids, num_layers_done, event)
        seen.append(dict(harness.transfer.sends[1].ready))

    harness.transfer.layers_ready = spy  # type: ignore[method-assign,assignment]
    harness.run(request())
    harness.step()
    assert [list(ready.values()) for ready in seen] == [[1], [2], [3]]
    harness.finish()


def test_a_waiting_prompt_is_cancelled_at_once_and_a_running_one_when_its_writes_end() -> None:
    harness = PrefillHarness(num_blocks=4, block_size=4, budget=4)
    running, waiting = harness.run(request(1, 16)), harness.run(request(2, 16))
    harness.step()
    for told in (running, waiting):
        told.cancelled = True
        harness.engine.handle(Cancel("d", told.request.transfer_id))
    assert waiting.outcome() == "cancelled"
    assert running.outcome() is None and harness.engine.snapshot.owned == 4
    assert harness.step() is False, "a cancelled prompt is computed no further"
    harness.settle_send(1)
    harness.pass_events()
    assert running.outcome() == "cancelled"
    assert harness.engine.snapshot.owned == 0
    harness.finish()


def test_a_failed_send_frees_its_blocks_and_says_why() -> None:
    harness = PrefillHarness(budget=4)
    told = harness.run(request(length=12))
    harness.step()
    harness.fail_send(1)
    harness.pass_events()
    assert told.ended is not None and (told.ended.outcome, told.ended.message) == ("failed", "a write failed")
    assert harness.engine.snapshot.owned == 0 and harness.step() is False
    harness.finish()


def test_what_was_computed_before_a_cancel_is_found_in_the_cache() -> None:
    harness = PrefillHarness(budget=8)
    told = harness.run(request(1, 20))
    harness.step()
    told.cancelled = True
    harness.engine.handle(Cancel("d", 1))
    harness.finish()
    again = harness.run(request(2, 20))
    harness.finish()
    assert again.ended is not None and again.ended.cached_tokens == 8


def test_the_next_prompt_starts_when_the_last_ones_kv_is_gone() -> None:
    harness = PrefillHarness(num_blocks=4, block_size=4)
    first, second = harness.run(request(1, 16)), harness.run(request(2, prompt_ids=(9,) * 13))
    harness.step()
    assert harness.step() is False and harness.engine.snapshot.waiting == 1
    harness.settle_send(1)
    harness.pass_events()
    assert first.ended is not None and second.ended is None
    assert harness.step() is True
    harness.finish()


def test_there_is_nothing_to_wake_up_for() -> None:
    assert PrefillHarness().engine.next_deadline() is None

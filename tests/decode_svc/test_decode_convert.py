"""Engine outputs as messages."""

import pytest

from common.engine.scoring import PART_SIZE
from common.pb.tandem.v1 import decode_pb2 as pb
from common.request_checks import MAX_LOGPROBS
from common.rpc.channel import MAX_MESSAGE_BYTES
from common.sampling import Candidate, FinishReason, SampledToken, TokenLogprobs
from decode_svc.convert import to_messages
from decode_svc.messages import (
    AcceptedOut,
    DeltaOut,
    FinishedOut,
    GatewayOut,
    PromptLogprobsOut,
    RejectedOut,
    ShortageOut,
)
from decode_svc.request import Outcome, Timings


def delta(
    index: int, *tokens: int, request: str = "r", choice: int = 0, attempt: int = 0, end: bool = False
) -> DeltaOut:
    sampled = tuple(SampledToken(token, TokenLogprobs(Candidate(token, -1.0))) for token in tokens)
    return DeltaOut("s", request, attempt, choice, index, sampled, FinishReason.LENGTH if end else None)


def test_nothing_makes_no_message() -> None:
    assert list(to_messages([], "d")) == []


def test_answers_come_before_the_one_step() -> None:
    outputs: list[GatewayOut] = [
        AcceptedOut("s", "a", 0),
        delta(0, 1, request="a"),
        RejectedOut("s", "b", 1, "top_p", "bad"),
        ShortageOut("s", "c", 2, "full", 1.5),
    ]
    messages = list(to_messages(outputs, "d"))
    assert [m.WhichOneof("message") for m in messages] == ["accepted", "rejected", "shortage", "step"]
    assert messages[0].accepted == pb.Accepted(request_id="a", attempt=0)
    assert messages[1].rejected == pb.Rejected(request_id="b", attempt=1, field="top_p", message="bad")
    assert messages[2].shortage == pb.Shortage(request_id="c", attempt=2, message="full", retry_after_seconds=1.5)


def test_tokens_of_one_choice_are_merged_and_others_are_not() -> None:
    outputs = [
        delta(3, 7),
        delta(0, 1, choice=1),
        delta(4, 8, 9, end=True),
        delta(0, 2, attempt=1),
        delta(0, 3, request="q"),
    ]
    (message,) = to_messages(outputs, "d")
    found = [(d.request_id, d.attempt, d.choice, d.first_index, list(d.token_ids)) for d in message.step.deltas]
    assert found == [("r", 0, 0, 3, [7, 8, 9]), ("r", 0, 1, 0, [1]), ("r", 1, 0, 0, [2]), ("q", 0, 0, 0, [3])]
    assert [d.finish_reason for d in message.step.deltas] == [2, 0, 0, 0]
    assert [lp.chosen.token_id for lp in message.step.deltas[0].logprobs] == [7, 8, 9]


def scores(first: int, count: int, request: str = "r") -> PromptLogprobsOut:
    entries = tuple(TokenLogprobs(Candidate(first + i, -1.0), (Candidate(2, -0.5),)) for i in range(count))
    return PromptLogprobsOut("s", request, 0, first, entries)


def found_scores(message: pb.DecodeMessage) -> list[tuple[str, int, int]]:
    return [(p.request_id, p.first_position, len(p.entries)) for p in message.step.prompt_logprobs]


def test_few_prompt_log_probabilities_share_the_step() -> None:
    outputs = [scores(1, 3), scores(4, 2), scores(1, 1, "q"), delta(0, 7), delta(0, 8, request="q")]
    (message,) = to_messages(outputs, "d")
    assert found_scores(message) == [("r", 1, 3), ("r", 4, 2), ("q", 1, 1)]
    assert len(message.step.deltas) == 2
    entry = message.step.prompt_logprobs[1].entries[1]
    assert (entry.chosen.token_id, entry.chosen.logprob) == (5, -1.0)
    assert [(c.token_id, c.logprob) for c in entry.top] == [(2, -0.5)]


def test_many_prompt_log_probabilities_go_ahead_in_bounded_steps() -> None:
    """What had to wait for a slow gateway: none is behind a delta of its request, whoever else is in between."""
    outputs: list[GatewayOut] = [
        AcceptedOut("s", "r", 0),
        scores(1, 512),
        delta(3, 9, request="q"),
        scores(513, 500),
        scores(1, 12, "t"),
        scores(1013, 1),
        AcceptedOut("s", "u", 0),
        delta(0, 7),
        delta(0, 8, request="t"),
    ]
    messages = list(to_messages(outputs, "d"))
    assert [m.WhichOneof("message") for m in messages] == ["accepted", "step", "step", "accepted", "step"]
    assert [found_scores(m) for m in messages if m.HasField("step")] == [
        [("r", 1, 512)],
        [("r", 513, 500), ("t", 1, 12)],
        [("r", 1013, 1)],
    ]
    assert [d.request_id for d in messages[-1].step.deltas] == ["q", "r", "t"]
    assert not any(m.step.deltas for m in messages[:-1])


def test_the_longest_step_of_scores_is_far_from_the_limit() -> None:
    entries = tuple(
        TokenLogprobs(Candidate(2**20 + i, -9.5), tuple(Candidate(2**20 + j, -1.5) for j in range(MAX_LOGPROBS)))
        for i in range(PART_SIZE)
    )
    (message,) = to_messages([PromptLogprobsOut("s", "r", 0, 1, entries)], "d")
    assert message.ByteSize() < MAX_MESSAGE_BYTES / 16


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_end_carries_what_was_measured(outcome: Outcome) -> None:
    timings = Timings(
        arrived=10.0,
        admitted=10.5,
        decode_cached_tokens=1,
        prefill_cached_tokens=2,
        computed_tokens=3,
        transfer_bytes=4,
        transfer_messages=5,
        transfer_exposed_seconds=0.25,
        transfer_seconds=0.5,
        prefill_seconds=0.75,
        prefill_worker="p",
        preemptions=6,
        prefill_retries=7,
    )
    (message,) = to_messages([FinishedOut("s", "r", 1, outcome, "why", timings, 8, 9, 1.0, "")], "d")
    (finished,) = message.step.finished
    assert pb.Outcome.Name(finished.outcome) == f"OUTCOME_{outcome.name}"
    assert (finished.request_id, finished.attempt, finished.message) == ("r", 1, "why")
    stats = {field.name: value for field, value in finished.stats.ListFields()}
    assert stats == {
        "prompt_tokens": 8,
        "output_tokens": 9,
        "decode_cached_tokens": 1,
        "prefill_cached_tokens": 2,
        "computed_tokens": 3,
        "transfer_bytes": 4,
        "transfer_messages": 5,
        "transfer_exposed_seconds": 0.25,
        "transfer_seconds": 0.5,
        "wait_seconds": 0.5,
        "prefill_seconds": 0.75,
        "prefill_worker": "p",
        "decode_worker": "d",
        "preemptions": 6,
        "prefill_retries": 7,
    }


def test_a_request_that_was_never_admitted_waited_for_nothing() -> None:
    (message,) = to_messages([FinishedOut("s", "r", 0, Outcome.CANCELLED, "", Timings(10.0), 8, 0, 1.0, "")], "d")
    assert message.step.finished[0].stats.wait_seconds == 0.0

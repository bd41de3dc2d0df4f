"""Engine outputs as protobuf messages to a gateway, coalesced."""

from collections.abc import Iterable, Sequence

from common.engine.scoring import PART_SIZE
from common.pb.tandem.v1 import decode_pb2 as pb
from common.pb.tandem.v1 import generation_pb2
from common.rpc.convert import finish_to_proto, logprobs_to_proto
from decode_svc.messages import (
    AcceptedOut,
    DeltaOut,
    FinishedOut,
    GatewayOut,
    PromptLogprobsOut,
    RejectedOut,
    ShortageOut,
)
from decode_svc.request import Outcome

_OUTCOMES = {
    Outcome.OK: pb.OUTCOME_OK,
    Outcome.CANCELLED: pb.OUTCOME_CANCELLED,
    Outcome.DEADLINE: pb.OUTCOME_DEADLINE,
    Outcome.TOO_COMPLEX: pb.OUTCOME_TOO_COMPLEX,
    Outcome.FAILED: pb.OUTCOME_FAILED,
}


def to_messages(outputs: Sequence[GatewayOut], worker_id: str) -> Iterable[pb.DecodeMessage]:
    """Answers to submissions first, then at most one Step with everything else, in order.

    Prompt log probabilities may be many: what is more than PART_SIZE of them goes ahead in Steps of its own, so that no
    message is too long. None is ever behind a delta of its request.
    """
    scores: list[pb.PromptLogprobsDelta] = []
    num_scores = 0
    deltas: dict[tuple[str, int, int], pb.Delta] = {}
    finished = []
    for output in outputs:
        match output:
            case PromptLogprobsOut():
                if scores and num_scores + len(output.entries) > PART_SIZE:
                    yield pb.DecodeMessage(step=pb.Step(prompt_logprobs=scores))
                    scores, num_scores = [], 0
                scores.append(_to_scores(output))
                num_scores += len(output.entries)
            case DeltaOut():
                _merge(deltas, output)
            case FinishedOut():
                finished.append(_to_finished(output, worker_id))
            case _:
                yield _to_answer(output)
    if scores or deltas or finished:
        yield pb.DecodeMessage(step=pb.Step(prompt_logprobs=scores, deltas=deltas.values(), finished=finished))


def _to_answer(output: AcceptedOut | RejectedOut | ShortageOut) -> pb.DecodeMessage:
    match output:
        case AcceptedOut():
            return pb.DecodeMessage(accepted=pb.Accepted(request_id=output.request_id, attempt=output.attempt))
        case RejectedOut():
            rejected = pb.Rejected(
                request_id=output.request_id, attempt=output.attempt, field=output.field, message=output.message
            )
            return pb.DecodeMessage(rejected=rejected)
        case ShortageOut():
            shortage = pb.Shortage(
                request_id=output.request_id,
                attempt=output.attempt,
                message=output.message,
                retry_after_seconds=output.retry_after,
            )
            return pb.DecodeMessage(shortage=shortage)


def _to_scores(output: PromptLogprobsOut) -> pb.PromptLogprobsDelta:
    return pb.PromptLogprobsDelta(
        request_id=output.request_id,
        attempt=output.attempt,
        first_position=output.first_position,
        entries=[logprobs_to_proto(entry) for entry in output.entries],
    )


def _merge(deltas: dict[tuple[str, int, int], pb.Delta], output: DeltaOut) -> None:
    """Tokens of one choice follow each other without gaps, so that they fit into one delta."""
    key = (output.request_id, output.attempt, output.choice)
    delta = deltas.get(key)
    if delta is None:
        delta = deltas[key] = pb.Delta(
            request_id=output.request_id,
            attempt=output.attempt,
            choice=output.choice,
            first_index=output.first_index,
        )
    delta.token_ids.extend(token.token_id for token in output.tokens)
    delta.logprobs.extend(logprobs_to_proto(t.logprobs) for t in output.tokens if t.logprobs is not None)
    delta.finish_reason = finish_to_proto(output.finish_reason)
    delta.computed_tokens = output.computed_tokens


def _to_finished(output: FinishedOut, worker_id: str) -> pb.Finished:
    timings = output.timings
    stats = generation_pb2.RequestStats(
        prompt_tokens=output.prompt_tokens,
        output_tokens=output.output_tokens,
        decode_cached_tokens=timings.decode_cached_tokens,
        prefill_cached_tokens=timings.prefill_cached_tokens,
        computed_tokens=timings.computed_tokens,
        transfer_bytes=timings.transfer_bytes,
        transfer_messages=timings.transfer_messages,
        transfer_exposed_seconds=timings.transfer_exposed_seconds,
        transfer_seconds=timings.transfer_seconds,
        wait_seconds=(timings.admitted or timings.arrived) - timings.arrived,
        prefill_seconds=timings.prefill_seconds,
        prefill_worker=timings.prefill_worker,
        decode_worker=worker_id,
        preemptions=timings.preemptions,
        prefill_retries=timings.prefill_retries,
    )
    return pb.Finished(
        request_id=output.request_id,
        attempt=output.attempt,
        outcome=_OUTCOMES[output.outcome],
        message=output.message,
        stats=stats,
    )

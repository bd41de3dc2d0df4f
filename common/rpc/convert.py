"""Between protobuf messages and the values that the rest of the code works with."""

from common.errors import InvalidRequest
from common.pb.tandem.v1 import generation_pb2 as pb
from common.sampling import (
    Candidate,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
)

_FINISH_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}
_KIND_TO_PROTO = {
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.EBNF: pb.GRAMMAR_KIND_EBNF,
    GrammarKind.STRUCTURAL_TAG: pb.GRAMMAR_KIND_STRUCTURAL_TAG,
}
_KIND_FROM_PROTO = {value: key for key, value in _KIND_TO_PROTO.items()}


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(reason: pb.FinishReason) -> FinishReason | None:
    return _FINISH_FROM_PROTO[reason]


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        grammar=None if params.grammar is None else _grammar_to_proto(params.grammar),
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest for a grammar of a kind that this version does not know."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def _grammar_to_proto(grammar: GrammarSpec) -> pb.Grammar:
    return pb.Grammar(kind=_KIND_TO_PROTO[grammar.kind], source=grammar.source)


def _grammar_from_proto(message: pb.Grammar) -> GrammarSpec:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"a grammar of unknown kind {message.kind}", field="grammar")
    return GrammarSpec(kind, message.source)


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=_candidate_to_proto(logprobs.chosen), top=[_candidate_to_proto(candidate) for candidate in logprobs.top]
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=_candidate_from_proto(message.chosen), top=tuple(_candidate_from_proto(c) for c in message.top)
    )


def sampled_from_proto(token_id: int, logprobs: pb.TokenLogprobs | None) -> SampledToken:
    return SampledToken(token_id, None if logprobs is None else logprobs_from_proto(logprobs))


def _candidate_to_proto(candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(token_id=candidate.token_id, logprob=candidate.logprob)


def _candidate_from_proto(message: pb.Candidate) -> Candidate:
    return Candidate(message.token_id, message.logprob)

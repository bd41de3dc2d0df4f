"""What a decode worker refuses at once: what it could never serve, or what would break its engine."""

from dataclasses import dataclass

from common.engine.grammar import GrammarState
from common.errors import ContextTooLong, InvalidRequest
from common.request_checks import check_grammar, check_sampling, check_token_ids
from decode_svc.request import ChoicePrefix, DecodeRequest

#: A year; beyond some centuries a thread cannot wait.
MAX_TIMEOUT = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Of this worker and its model."""

    #: Longest prompt plus output in tokens.
    max_request_tokens: int
    vocab_size: int
    max_choices: int = 128


def check_request(request: DecodeRequest, limits: RequestLimits) -> None:
    """Raise InvalidRequest naming the field that makes `request` impossible."""
    _check_tokens(request, limits)
    check_sampling(request.params, limits.vocab_size)
    check_grammar(request.params, compiled=request.grammar is not None)
    _check_choices(request, limits)
    if request.timeout is not None and not request.timeout <= MAX_TIMEOUT:
        raise InvalidRequest(f"timeout_seconds {request.timeout!r} is out of range", field="timeout_seconds")


def _check_tokens(request: DecodeRequest, limits: RequestLimits) -> None:
    length = len(request.prompt_ids)
    check_token_ids(request.prompt_ids, limits.vocab_size, field="prompt_ids")
    if length >= limits.max_request_tokens:
        raise ContextTooLong(
            f"a prompt of {length} tokens leaves no room for an answer: this worker holds "
            f"{limits.max_request_tokens} tokens of prompt and answer together",
            field="prompt_ids",
        )


def _check_choices(request: DecodeRequest, limits: RequestLimits) -> None:
    if not 1 <= len(request.choices) <= limits.max_choices:
        raise InvalidRequest(f"{len(request.choices)} choices; 1 to {limits.max_choices} are possible", field="choices")
    if all(choice.finished for choice in request.choices):
        raise InvalidRequest("every choice has ended already", field="choices")
    for choice in request.choices:
        count = len(choice.output_ids)
        too_long = count >= request.params.max_tokens or len(request.prompt_ids) + count >= limits.max_request_tokens
        if too_long and not choice.finished:
            raise InvalidRequest(f"{count} output tokens given, and no more may follow", field="choices")
        if count:
            check_token_ids(choice.output_ids, limits.vocab_size, field="choices")


def start_grammars(request: DecodeRequest) -> list[GrammarState | None]:
    """Where each choice's output so far leads to in the request's grammar; None for those that need none.

    Raises InvalidRequest for output that this grammar does not allow (it came of another version of the compiler, or
    of no grammar at all).
    """
    return [None if choice.finished else _start_grammar(request, choice) for choice in request.choices]


def _start_grammar(request: DecodeRequest, choice: ChoicePrefix) -> GrammarState | None:
    if request.grammar is None:
        return None
    state = request.grammar.start()
    for index, token_id in enumerate(choice.output_ids):
        if not state.try_accept(token_id):
            message = f"the grammar does not allow token {token_id} as output token {index}"
            raise InvalidRequest(message, field="choices")
    if state.terminated:
        raise InvalidRequest("the output has come to the grammar's end, and no more may follow", field="choices")
    return state

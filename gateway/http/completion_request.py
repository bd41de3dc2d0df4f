"""From a completion body to prepared requests, one per prompt, and the format of their answer. Knows no sockets."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.generation import ServingLimits
from gateway.http.call import Call, options_of, stream_mode
from gateway.http.completion_format import CompletionFormat
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import CompletionBody
from gateway.prompts import text_ids
from gateway.serving import ServingModel
from gateway.validation import MAX_CHOICES, check_options, check_prompt, prepare


async def completion_call(body: CompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    _refuse_completion_fields(body)
    options = options_of(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    check_options(options, limits.vocab_size)
    mode = stream_mode(body)
    prompts = _prompts(body)
    num_choices = options.n or 1
    if len(prompts) * num_choices > MAX_CHOICES:
        raise InvalidRequest(f"prompt: at most {MAX_CHOICES} choices over all prompts", field="prompt")
    prompt_ids = [await _prompt_ids(prompt, model, limits) for prompt in prompts]
    format_ = CompletionFormat(
        name,
        model.tokenizer,
        logprobs=options.logprobs is not None,
        choices_per_prompt=num_choices,
        echoes=_echoes(body, model, prompts),
    )
    prepared = [
        prepare(
            f"{format_.id}-{index}",
            ids,
            options,
            model.defaults,
            limits,
            prompt_field="prompt",
            allow_empty=bool(body.echo),
        )
        for index, ids in enumerate(prompt_ids)
    ]
    return Call(prepared, format_, mode)


async def _prompt_ids(prompt: str | list[int], model: ServingModel, limits: ServingLimits) -> list[int]:
    if isinstance(prompt, str):
        return await text_ids(model, prompt, limits, field="prompt")
    check_prompt(prompt, limits, field="prompt")
    return prompt


def _refuse_completion_fields(body: CompletionBody) -> None:
    refuse_unsupported(body.model_extra)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", field="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported beside n", field="best_of", code="unsupported_parameter")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported", field="echo", code="unsupported_parameter")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [entry for entry in prompt if isinstance(entry, str | list)]


def _echoes(body: CompletionBody, model: ServingModel, prompts: Sequence[str | list[int]]) -> list[str]:
    """Texts as the client gave them; token ids as text, special tokens included."""
    if not body.echo:
        return [""] * len(prompts)
    decode = model.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=False) for prompt in prompts]

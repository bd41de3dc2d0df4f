"""From a completion body to prepared requests, one per prompt, and the format of their answer. Knows no sockets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from common.errors import InvalidRequest
from gateway.generation import ServingLimits
from gateway.http.call import Call, options_of, stream_mode
from gateway.http.completion_format import CompletionFormat, CompletionShape
from gateway.http.echo import Echo, aligned_echo, plain_echo
from gateway.http.prompt_logprobs import refuse_streamed
from gateway.http.refused import refuse_unsupported
from gateway.http.schemas import CompletionBody
from gateway.http.structured_fields import checked_grammar
from gateway.off_loop import off_loop
from gateway.options import GenerationOptions
from gateway.prompts import text_ids
from gateway.serving import ServingModel
from gateway.validation import MAX_CHOICES, RANGES, check_options, check_prompt, prepare


async def completion_call(body: CompletionBody, model: ServingModel, limits: ServingLimits) -> Call:
    """Raises NotFound (model) or InvalidRequest naming the field."""
    name = model.check_name(body.model)
    _refuse_completion_fields(body)
    options = _options(body, limits)
    mode = stream_mode(body)
    prompts = _prompts(body)
    if len(prompts) * (options.n or 1) > MAX_CHOICES:
        raise InvalidRequest(f"prompt: at most {MAX_CHOICES} choices over all prompts", field="prompt")
    options = replace(options, grammar=await checked_grammar(body))
    prompt_ids = [await _prompt_ids(prompt, model, limits) for prompt in prompts]
    shape = CompletionShape(
        prompt_ids,
        [await _echo(body, model, prompt, ids) for prompt, ids in zip(prompts, prompt_ids, strict=True)],
        n=body.n or 1,
        best_of=options.n or 1,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    format_ = CompletionFormat(name, model.tokenizer, shape)
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


def _options(body: CompletionBody, limits: ServingLimits) -> GenerationOptions:
    """Checked options. Those of `best_of` need log probabilities, and those of `echo` the prompt's, to be computed."""
    options = options_of(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    check_options(options, limits.vocab_size)
    if body.echo and body.logprobs is not None:
        options = replace(options, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    if _best_of(body) > (body.n or 1):
        options = replace(options, n=_best_of(body), logprobs=body.logprobs or 0)
    return options


def _best_of(body: CompletionBody) -> int:
    """Choices to generate for each prompt."""
    n, (_, most) = body.n or 1, RANGES["n"]
    if body.best_of is None:
        return n
    if not n <= body.best_of <= most:
        raise InvalidRequest(f"best_of must be a number from n to {most:g}", field="best_of")
    if body.stream and body.best_of > n:
        raise InvalidRequest("best_of beyond n is not available with stream", field="best_of")
    return body.best_of


async def _prompt_ids(prompt: str | list[int], model: ServingModel, limits: ServingLimits) -> list[int]:
    if isinstance(prompt, str):
        return await text_ids(model, prompt, limits, field="prompt")
    check_prompt(prompt, limits, field="prompt")
    return prompt


def _refuse_completion_fields(body: CompletionBody) -> None:
    refuse_unsupported(body.model_extra)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", field="suffix", code="unsupported_parameter")
    refuse_streamed(body.prompt_logprobs, stream=body.stream)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


async def _echo(body: CompletionBody, model: ServingModel, prompt: str | list[int], ids: Sequence[int]) -> Echo | None:
    if not body.echo:
        return None
    if body.logprobs is None:
        return await off_loop(lambda: plain_echo(model.tokenizer, prompt), len(ids))
    return await off_loop(lambda: aligned_echo(model.tokenizer, prompt, ids), len(ids))

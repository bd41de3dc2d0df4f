"""The text layer: deltas of tokens to deltas of text, with stop strings, log probabilities and usage."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from common.sampling import FinishReason, SamplingParams
from common.text.tokenizer import Tokenizer
from gateway.accounting import EdgeMetrics, RequestRecord
from gateway.completion import ChoiceDelta, ChoiceText, TextOptions, TextStream
from gateway.generation import GenerationRequest
from tests.common.text.model_folders import byte_level_folder
from tests.gateway.fakes import FakeGeneration, deltas


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("tiny")))


def shown(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    options: TextOptions,
    *,
    finish: FinishReason = FinishReason.LENGTH,
    per_delta: int = 1,
) -> tuple[ChoiceText, list[ChoiceDelta]]:
    choice = ChoiceText(0, tokenizer, options)
    result = []
    for delta in deltas(ids, finish=finish, per_delta=per_delta, logprobs=1):
        if choice.finish_reason is None and (new := choice.push(delta)) is not None:
            result.append(new)
    return choice, result


def text_of(result: Sequence[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in result)


TEXTS = st.text(alphabet=st.sampled_from("ab é😀\n日"), min_size=1, max_size=20)


@given(TEXTS, st.lists(st.text(st.sampled_from("ab é😀"), min_size=1, max_size=3), max_size=3), st.integers(1, 4))
def test_text_tokens_and_usage_agree(tokenizer: Tokenizer, text: str, stops: list[str], per_delta: int) -> None:
    ids = tokenizer.encode(text, parse_special=False)
    choice, result = shown(tokenizer, ids, TextOptions(stop=tuple(stops)), per_delta=per_delta)
    tokens = [token for delta in result for token in delta.tokens]
    assert [token.token_id for token in tokens] == ids[: choice.num_tokens]
    assert [delta.finish_reason for delta in result[:-1]] == [None] * (len(result) - 1)
    hits = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not hits:
        assert (text_of(result), choice.num_tokens) == (text, len(ids))
        assert choice.finish_reason is FinishReason.LENGTH
    else:
        # Usage counts up to the token that completed the first stop string.
        assert len(tokenizer.decode(ids[: choice.num_tokens])) >= min(hits)
        assert not any(stop in tokenizer.decode(ids[: choice.num_tokens - 1]) for stop in stops)
        assert text.startswith(text_of(result))
        assert not any(stop in text_of(result) for stop in stops)
        assert choice.finish_reason is FinishReason.STOP
    assert all(token.offset <= len(text_of(result)) for token in tokens)


def test_stop_string_within_one_delta_cuts_there(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    choice, result = shown(tokenizer, ids, TextOptions(stop=("o th",)), per_delta=len(ids))
    assert text_of(result) == "one tw"
    assert choice.num_tokens < len(ids)
    assert result[-1].finish_reason is FinishReason.STOP


def test_end_token_counts_but_adds_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), 2]
    for options in (TextOptions(), TextOptions(skip_special_tokens=False)):
        choice, result = shown(tokenizer, ids, options, finish=FinishReason.STOP)
        assert (text_of(result), choice.num_tokens) == ("hi", len(ids))
        assert sum(len(delta.tokens) for delta in result) == len(ids)


def test_stop_token_of_plain_text_is_shown_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello!")
    _, hidden = shown(tokenizer, ids, TextOptions(), finish=FinishReason.STOP)
    _, visible = shown(tokenizer, ids, TextOptions(include_stop=True), finish=FinishReason.STOP)
    assert (text_of(hidden), text_of(visible)) == ("hello", "hello!")


def test_special_tokens_are_skipped_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    _, skipped = shown(tokenizer, ids, TextOptions())
    _, kept = shown(tokenizer, ids, TextOptions(skip_special_tokens=False))
    assert (text_of(skipped), text_of(kept)) == ("ab", "a<|im_end|>b")


def test_no_stop_before_min_tokens(tokenizer: Tokenizer) -> None:
    one = tokenizer.encode("q")
    choice, result = shown(tokenizer, one * 20, TextOptions(stop=("q",), min_tokens=10))
    assert (text_of(result), choice.num_tokens) == ("q" * 10, 11)


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("😀")[:1]
    choice, result = shown(tokenizer, [*tokenizer.encode("x"), *half], TextOptions())
    assert text_of(result) == "x\ufffd"
    assert choice.num_tokens == len([*tokenizer.encode("x"), *half])


def test_tokens_go_out_with_the_text_they_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", parse_special=False)
    assert len(ids) == 2
    _, result = shown(tokenizer, ids, TextOptions(stop=("az",)))
    assert [(delta.text, len(delta.tokens)) for delta in result] == [("ab", 2)]
    assert [token.offset for token in result[0].tokens] == [0, 1]


def record() -> RequestRecord:
    return RequestRecord(EdgeMetrics(CollectorRegistry()), "id", "test")


async def test_stream_cancels_a_stopped_choice_and_counts_what_was_used(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    script = [*deltas(ids, choice=0), *deltas(ids, choice=1)]
    request = GenerationRequest("r", (5, 6, 7), params=SamplingParams(), num_choices=2)
    generation = FakeGeneration(request, script, cached_tokens=2)
    stream = TextStream(generation, tokenizer, TextOptions(stop=("e t",)), record(), prompt_tokens=3, num_choices=2)
    texts = ["", ""]
    async for delta in stream:
        texts[delta.choice] += delta.text
    assert texts == ["on", "on"]
    assert generation.cancelled_choices == {0, 1}
    usage = stream.usage
    used = next(n for n in range(len(ids)) if "e t" in tokenizer.decode(ids[:n]))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 2 * used, 2)


async def test_generation_that_ends_too_early_is_a_broken_invariant(tokenizer: Tokenizer) -> None:
    generation = FakeGeneration(GenerationRequest("r", (5,), params=SamplingParams()), deltas([70], finish=None))
    stream = TextStream(generation, tokenizer, TextOptions(), record(), prompt_tokens=1, num_choices=1)
    with pytest.raises(AssertionError, match=r"choices \[0\] of 1 unfinished"):
        _ = [delta async for delta in stream]

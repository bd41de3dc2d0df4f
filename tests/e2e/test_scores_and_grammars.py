"""Prompt log probabilities and grammars of real workers: the same from both sides, and those of transformers."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.engine.sampler.logprobs import token_logprobs
from common.sampling import GrammarKind, GrammarSpec, SamplingParams, TokenLogprobs
from tests.e2e.asking import Generated, submit
from tests.e2e.cluster import Cluster
from tests.factories.oracle import Oracle
from tests.factories.sequences import prompt
from tests.factories.served_model import END_TOKEN_ID

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOP = 3
VOCAB = 250


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval())


def ask(
    served: Cluster, ids: Sequence[int], params: SamplingParams, salt: str, *, remote: bool, n: int = 1
) -> Generated:
    prefill = [served.members["prefill-0"].address] if remote else []
    answer = submit(served.members["decode-0"].address, ids, params, prefill=prefill, n=n, salt=salt)
    served.wait_idle()
    return answer


def assert_scores(actual: Sequence[TokenLogprobs], oracle: Oracle, ids: list[int]) -> None:
    logits = oracle.logits(ids)
    assert len(actual) == len(ids) - 1
    for position, mine in enumerate(actual, 1):
        theirs = token_logprobs(logits[position - 1], ids[position], NUM_TOP)
        for one, other in zip((mine.chosen, *mine.top), (theirs.chosen, *theirs.top), strict=True):
            assert one.token_id == other.token_id, f"position {position}: {mine}, not {theirs}"
            assert one.logprob == pytest.approx(other.logprob, abs=2e-4), f"position {position}: {mine}, not {theirs}"


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("length", [1, 2, 47, 48, 49, 700])
def test_prompt_log_probabilities_are_those_of_transformers(
    served: Cluster, oracle: Oracle, length: int, remote: bool
) -> None:
    ids = prompt(length, VOCAB, seed=length)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)
    salt = f"scores {length} {remote}"
    for _ in range(2):  # the second time over warm caches
        answer = ask(served, ids, params, salt, remote=remote, n=2)
        assert_scores(answer.prompt_logprobs, oracle, ids)
        assert answer.all_token_ids == [oracle.greedy(ids, 4)] * 2
        assert answer.cached_tokens == 0
        # The shortest ones are not worth a transfer.
        assert answer.was_transferred == (remote and length > 2)


def test_every_choice_follows_the_grammar_wherever_it_begins(served: Cluster, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    pattern = r"[a-f]{3,8}(-[0-9]{2})+"
    grammar = GrammarSpec(GrammarKind.EBNF, 'root ::= [a-f]{3,8} ("-" [0-9]{2})+')
    params = SamplingParams(seed=11, max_tokens=40, ignore_eos=True, grammar=grammar, logprobs=0)
    ids = prompt(200, VOCAB, seed=1)
    here = ask(served, ids, params, "grammar here", remote=False, n=3)
    there = ask(served, ids, params, "grammar there", remote=True, n=3)
    assert (here.was_transferred, there.was_transferred) == (False, True)
    assert here.all_token_ids == there.all_token_ids
    for tokens in here.all_token_ids:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if tokens[-1] == END_TOKEN_ID:
            assert re.fullmatch(pattern, text), text
        else:
            assert len(tokens) == 40 and set(text) <= set("abcdef-0123456789"), text

"""Halves of surrogate pairs, which the library takes for characters: no grammar of any kind lets them out."""

from codecs import getincrementaldecoder

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.grammar.surrogates import SurrogateRule, has_surrogate
from common.sampling import GrammarKind, GrammarSpec
from tests.common.engine.grammar.tiny import END_IDS, Bench, allowed_ids, make_vocabulary, mask_of, random_output

ANYTHING = {
    "string": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 30, "maxLength": 40}'),
    "unbounded string": GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "string"}'),
    "counted set": GrammarSpec(GrammarKind.EBNF, r"root ::= [^\n\r]{40,60}"),
    "two sets": GrammarSpec(GrammarKind.EBNF, "root ::= ([^a] | [a])*"),
    "set": GrammarSpec(GrammarKind.EBNF, "root ::= [^a]*"),
    "range": GrammarSpec(GrammarKind.EBNF, r"root ::= [\u0100-\uffff]{40,60}"),
    "tag": GrammarSpec(
        GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "any_text", "excludes": []}}'
    ),
}
every_kind = pytest.mark.parametrize("spec", ANYTHING.values(), ids=ANYTHING)


def byte_ids(bench: Bench) -> dict[int, int]:
    """Tokens of single bytes, by their byte."""
    tokens = map(bench.tokenizer.token_bytes, range(bench.tokenizer.vocab_size))
    silent = bench.tokenizer.special_ids | set(END_IDS)
    return {token[0]: i for i, token in enumerate(tokens) if len(token) == 1 and i not in silent}


@every_kind
def test_behind_the_lead_byte_only_characters_go_on(bench: Bench, spec: GrammarSpec) -> None:
    ids = byte_ids(bench)
    state = bench.compile(spec).start()
    if spec.kind is GrammarKind.JSON_SCHEMA:
        state.accept(ids[ord('"')])
    state.accept(ids[0xED])
    allowed = allowed_ids(mask_of(state), bench.vocab_size)
    assert {ids[byte] for byte in range(0x80, 0xA0)} <= set(allowed)
    for byte in range(0xA0, 0xC0):
        assert ids[byte] not in allowed
        assert not state.try_accept(ids[byte])
    state.accept(ids[0x9F])
    state.accept(ids[0xBF])


@every_kind
def test_such_bytes_are_fine_elsewhere(bench: Bench, spec: GrammarSpec) -> None:
    ids = byte_ids(bench)
    state = bench.compile(spec).start()
    if spec.kind is GrammarKind.JSON_SCHEMA:
        state.accept(ids[ord('"')])
    for byte in "\ud7ff\ue000ꠀ".encode():
        state.accept(ids[byte])


@every_kind
def test_random_outputs_are_text(bench: Bench, spec: GrammarSpec) -> None:
    grammar = bench.compile(spec)
    for seed in range(20):
        output = b"".join(map(bench.tokenizer.token_bytes, random_output(grammar, seed)))
        # Strict, but for a last character that is cut off.
        getincrementaldecoder("utf-8")().decode(output)


@pytest.mark.parametrize("code", [0xD800, 0xDBFF, 0xDC00, 0xDFFF])
def test_tokens_that_hold_one_stand_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    half = b"a" + chr(code).encode(errors="surrogatepass") + b"b"
    token = byte_ids(bench)[ord("k")]
    real = bench.tokenizer.token_bytes
    monkeypatch.setattr(bench.tokenizer, "token_bytes", lambda id_: half if id_ == token else real(id_))
    odd = make_vocabulary(bench.tokenizer)
    assert odd.plain.decoded_vocab[token] == odd.marked.decoded_vocab[token] == b""


@pytest.mark.parametrize("text", ["", "\ud7ff", "\ue000", "힣", "a\U0010ffff", "ꠀ"])
def test_characters_hold_none(text: str) -> None:
    assert not has_surrogate(text.encode())


@given(st.lists(st.binary(max_size=3), max_size=40), st.integers(0, 40))
def test_rule_is_about_where_two_tokens_meet(tokens: list[bytes], padding: int) -> None:
    tokens += [b"\xed", b"x\xed", b"\xa0", b"\xbfx", b"\x9f"]
    rule = SurrogateRule.of(tokens, len(tokens) + padding)
    bits = np.unpackbits(rule.allowed.view(np.uint8), bitorder="little")
    assert bits.size == 32 * -(-(len(tokens) + padding) // 32)
    for i, first in enumerate(tokens):
        for j, second in enumerate(tokens):
            meets = has_surrogate(first[-1:] + second[:1])
            assert (rule.opens(i) and rule.completes(j)) == meets
            assert not (meets and bits[j])

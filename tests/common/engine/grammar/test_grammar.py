"""Grammars and places in them: what may follow what, where it ends, and that it is a function of the tokens alone."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.grammar import Grammar
from common.engine.grammar.vocabulary import Vocabulary, vocabulary_of_folder
from common.engine.sampler import Sampler, SampleRow
from common.sampling import GrammarKind, GrammarSpec, SamplingParams
from common.text.tokenizer import Tokenizer
from tests.common.engine.grammar.tiny import (
    END_IDS,
    EXPRESSION,
    PERSON,
    SPECS,
    Bench,
    allowed_ids,
    make_vocabulary,
    mask_of,
    masks_along,
    random_output,
)
from tests.common.text.model_folders import byte_level_folder

END = END_IDS[0]
every_kind = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(scope="session")
def person(bench: Bench) -> Grammar:
    return bench.schema(PERSON)


class TestWhatIsAllowed:
    @pytest.mark.parametrize(
        ("name", "good", "bad"),
        [
            ("schema", '{"name": "é", "age": 7}', '{"name": "x", "age": 151}'),
            ("schema", '{"name": "", "age": 0, "tags": ["a", null]}', '{"name":"x","age":1}'),
            ("schema", '{"name": "日本", "age": 150}', '{\n  "name": "x", "age": 1}'),
            ("schema", '{"name": "x", "age": 1, "tags": []}', '{"name": "x", "age": 1, "more": 1}'),
            ("counted", "café 12 3", "cafe"),
            ("counted", "one", "one "),
            ("ebnf", "1+(2+33)", "1+(2+33"),
            ("tag", 'say <f>{"x": 1}</f> and <f>{"x":2}</f>', '<f>{"x": "1"}</f>'),
            ("tag", "nothing at all", '<f>{"x":  1}</f>'),
        ],
    )
    def test_whole_outputs_of_each_kind(self, bench: Bench, name: str, good: str, bad: str) -> None:
        grammar = bench.compile(SPECS[name])
        assert bench.accepts(grammar, good)
        assert not bench.accepts(grammar, bad)

    @pytest.mark.parametrize("bounds", ['"maxLength": 3', '"minLength": 1, "maxLength": 1', '"minLength": 1'])
    @pytest.mark.parametrize("inside", ["a", "é", "日"])
    @pytest.mark.parametrize("bare", ["\n", "\t", "\0", "\x1f", "\\", '"'])
    def test_strings_of_bounded_length_are_json(self, bench: Bench, bounds: str, inside: str, bare: str) -> None:
        schema = '{"type": "string", ' + bounds + "}"
        tag = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": ' + schema + "}}"
        for grammar in (bench.schema(schema), bench.compile(GrammarSpec(GrammarKind.STRUCTURAL_TAG, tag))):
            assert json.loads(f'"{inside}"') and bench.accepts(grammar, f'"{inside}"')
            assert not bench.accepts(grammar, f'"{bare}"')
            assert not bench.accepts(grammar, '""') or "minLength" not in bounds

    @pytest.mark.parametrize("inside", [r"\"", r"\\", r"\n", r"a\tb"])
    @pytest.mark.parametrize("bounds", ['"minLength": 1', '"maxLength": 9'])
    def test_strings_of_bounded_length_take_escapes(self, bench: Bench, bounds: str, inside: str) -> None:
        """Whatever else looks like a rule of them."""
        schema = (
            '{"type": "object", "properties": {"a": {"type": "string", ' + bounds + "}, "
            '"b": {"enum": ["root_prop_0_characters{1, -1}"]}}, "required": ["a", "b"]}'
        )
        text = f'{{"a": "{inside}", "b": "root_prop_0_characters{{1, -1}}"}}'
        assert json.loads(text) and bench.accepts(bench.schema(schema), text)

    @every_kind
    def test_a_mask_has_exactly_the_tokens_that_can_be_accepted(self, bench: Bench, spec: GrammarSpec) -> None:
        """With special tokens and ids of no token among those that never can."""
        grammar = bench.compile(spec)
        output = random_output(grammar, seed=1, longest=10)
        for count, mask in enumerate(masks_along(grammar, output)):
            can = [i for i in range(bench.vocab_size) if follows(grammar, output[:count], i)]
            assert allowed_ids(mask, bench.vocab_size) == can, output[:count]
            assert not set(can) & (bench.tokenizer.special_ids - {END})

    def test_text_that_spells_a_special_token_is_text(self, bench: Bench) -> None:
        grammar = bench.regex(r"<\|im_end\|>")
        letters = bench.tokenizer.encode("<|im_end|>", parse_special=False)
        state = grammar.start()
        assert not state.try_accept(END)
        assert all(state.try_accept(token) for token in (*letters, END))

    def test_an_added_token_that_is_not_special_counts_by_its_text(self, bench: Bench) -> None:
        think = bench.tokenizer.token_id("<think>")
        assert think is not None and think not in bench.tokenizer.special_ids
        assert bench.regex("<think>[a-z]").start().try_accept(think)


def follows(grammar: Grammar, path: list[int], token_id: int) -> bool:
    state = grammar.start()
    return all(state.try_accept(token) for token in (*path, token_id))


class TestTheEnd:
    def test_only_end_tokens_follow_a_finished_output(self, bench: Bench) -> None:
        state = bench.regex("one").start()
        for token in bench.encode("one"):
            assert END not in allowed_ids(mask_of(state), bench.vocab_size)
            state.accept(token)
        assert allowed_ids(mask_of(state), bench.vocab_size) == [END]
        assert not state.terminated
        state.accept(END)
        assert state.terminated and not state.stuck

    def test_its_time_is_told_once(self, bench: Bench) -> None:
        state = bench.ebnf(EXPRESSION).start()
        assert state.take_seconds() == 0.0
        for use in (
            lambda: mask_of(state),
            lambda: state.try_accept(END_IDS[0]),
            lambda: state.accept(*bench.encode("1")),
        ):
            use()
            assert state.take_seconds() > 0.0 and state.take_seconds() == 0.0

    def test_nothing_may_be_asked_of_it_after_its_end(self, bench: Bench) -> None:
        state = bench.regex("").start()
        state.accept(END)
        assert not state.try_accept(END)
        with pytest.raises(AssertionError, match="after the end"):
            state.accept(END)
        with pytest.raises(AssertionError, match="end of the grammar"):
            mask_of(state)

    @pytest.mark.parametrize("token_id", [0, END, 3000])
    def test_a_token_that_is_not_allowed_is_an_assertion_and_changes_nothing(self, bench: Bench, token_id: int) -> None:
        state = bench.regex("one").start()
        before = mask_of(state)
        with pytest.raises(AssertionError, match=f"does not allow token {token_id} here"):
            state.accept(token_id)
        assert np.array_equal(mask_of(state), before) and not state.terminated

    def test_each_end_token_of_the_model_ends_it(self, tokenizer: Tokenizer) -> None:
        letter = tokenizer.encode("x", add_special_tokens=False)[0]
        vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size, (2, letter))
        state = Bench(tokenizer, vocabulary).regex("one").start()
        for token in tokenizer.encode("one", add_special_tokens=False):
            state.accept(token)
        assert allowed_ids(mask_of(state), tokenizer.vocab_size) == sorted([2, letter])
        state.accept(letter)
        assert state.terminated

    def test_where_nothing_can_follow_end_tokens_do(self, bench: Bench) -> None:
        """A rule that never comes to an end; else a row would have no token left."""
        state = bench.ebnf("root ::= root").start()
        assert allowed_ids(mask_of(state), bench.vocab_size) == [END] and state.stuck
        state.accept(END)
        assert state.terminated

    def test_a_character_that_no_token_spells_ends_the_output(self, bench: Bench) -> None:
        tokens = [b"", b"", b"", b"a", b"b"]
        few = Vocabulary(xgrammar.TokenizerInfo(tokens, vocab_size=5, stop_token_ids=[2]))
        state = Bench(bench.tokenizer, few).regex("ab\u00e9").start()
        for token in (3, 4):
            state.accept(token)
        # Forced output is not asked for its masks first.
        assert state.try_accept(2) and state.terminated

    def test_it_is_not_an_end_while_something_can_follow(self, bench: Bench) -> None:
        assert not bench.regex("ab").start().try_accept(END)


class TestReplay:
    @every_kind
    def test_forced_tokens_lead_to_the_same_masks(self, bench: Bench, spec: GrammarSpec) -> None:
        grammar = bench.compile(spec)
        for seed in range(5):
            output = random_output(grammar, seed)
            drawn = masks_along(grammar, output)
            for cut in (0, len(output) // 2, len(output) - 1):
                state = grammar.start()
                for token in output[:cut]:
                    assert state.try_accept(token)
                assert np.array_equal(mask_of(state), drawn[cut])

    @every_kind
    def test_states_of_one_grammar_do_not_share_a_place(self, bench: Bench, spec: GrammarSpec) -> None:
        grammar = bench.compile(spec)
        one, other = grammar.start(), grammar.start()
        at_start = mask_of(other)
        for token in random_output(grammar, seed=2, longest=6):
            one.accept(token)
        assert np.array_equal(mask_of(other), at_start)

    @every_kind
    def test_a_serialized_grammar_is_the_same_grammar(self, bench: Bench, spec: GrammarSpec) -> None:
        """For a worker that has read the same folder by itself."""
        here = bench.compile(spec)
        there = make_vocabulary(bench.tokenizer).load_grammar(spec.kind, here.serialized)
        assert (there.serialized, there.vocab_size, there.end_token_ids) == (here.serialized, here.vocab_size, END_IDS)
        assert there.num_words == here.num_words == -(-bench.vocab_size // 32)
        for seed in range(5):
            output = random_output(here, seed)
            pairs = zip(masks_along(here, output), masks_along(there, output), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)


class TestSampling:
    """Whatever the logits are, what is drawn matches from the first token on."""

    @settings(max_examples=40)
    @given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 5.0]), top_k=st.sampled_from([0, 3]))
    def test_every_output_is_valid_json_of_its_schema(
        self, bench: Bench, person: Grammar, seed: int, temperature: float, top_k: int
    ) -> None:
        sampler = Sampler(bench.vocab_size, END_IDS)
        params = SamplingParams(temperature=temperature, seed=seed, top_k=top_k, min_tokens=64, max_tokens=256)
        generator = torch.Generator().manual_seed(seed)
        state, output = person.start(), list[int]()
        while not state.terminated:
            assert len(output) < 256, bench.text(output)
            logits = torch.randn(1, bench.vocab_size, generator=generator) * 8
            row = SampleRow(params, 0, len(output), (), tuple(output), mask_of(state))
            [drawn] = sampler.sample(logits, [row])
            output.append(drawn.token_id)
            state.accept(drawn.token_id)
        jsonschema.validate(json.loads(bench.text(output[:-1])), json.loads(PERSON))


class TestVocabulary:
    def test_it_is_the_models_width_whatever_the_tokenizers(self, tokenizer: Tokenizer) -> None:
        for size in (tokenizer.vocab_size - 3, tokenizer.vocab_size, tokenizer.vocab_size + 70):
            bench = Bench(tokenizer, Vocabulary.of(tokenizer, size, END_IDS))
            allowed = allowed_ids(mask_of(bench.regex("[^x]+").start()), size)
            assert allowed and max(allowed) < min(size, tokenizer.vocab_size)

    def test_serialized_it_is_the_same(self, vocabulary: Vocabulary) -> None:
        again = Vocabulary.deserialize(vocabulary.serialize())
        assert again.plain.decoded_vocab == vocabulary.plain.decoded_vocab
        assert again.serialize() == vocabulary.serialize()

    def test_a_folder_without_a_tokenizer_and_a_model_without_an_end_have_none(self, tmp_path: Path) -> None:
        assert vocabulary_of_folder(tmp_path, 400, END_IDS) is None
        folder = byte_level_folder(tmp_path / "model")
        assert vocabulary_of_folder(folder, 400, ()) is None
        found = vocabulary_of_folder(folder, 400, END_IDS)
        assert found is not None and tuple(found.plain.stop_token_ids) == END_IDS

    @pytest.mark.parametrize("serialized", [b"", b"{}", b"\xff\xfe", b"[1]", b"null"])
    def test_other_bytes_are_no_grammar(self, vocabulary: Vocabulary, serialized: bytes) -> None:
        with pytest.raises(ValueError, match="no compiled grammar"):
            vocabulary.load_grammar(GrammarKind.EBNF, serialized)

    @pytest.mark.parametrize(("extra", "ends"), [(1, END_IDS), (0, (0, 2))])
    def test_a_grammar_of_another_vocabulary_is_refused(self, bench: Bench, extra: int, ends: tuple[int, ...]) -> None:
        other = Vocabulary.of(bench.tokenizer, bench.vocab_size + extra, ends)
        with pytest.raises(ValueError, match="no compiled grammar"):
            other.load_grammar(GrammarKind.EBNF, bench.regex("one").serialized)

"""Marks that are special tokens: text in structural tags, forbidden in every other grammar, and never an end."""

import contextlib
import json
from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.grammar import Grammar
from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.loader import GrammarLoader
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest
from common.sampling import GrammarKind, GrammarSpec
from common.text.marks import ARGS, END_THINK, MARKS, THINK, TOOL_CALLS
from common.text.tokenizer import Tokenizer
from tests.common.engine.grammar.tiny import (
    END_IDS,
    SPECS,
    Bench,
    allowed_ids,
    make_vocabulary,
    mask_of,
    masks_along,
    no_bugs,
    random_output,
)
from tests.common.text.model_folders import byte_level_folder

END = END_IDS[0]
PATIENCE = 90.0


def spec(node: dict[str, object]) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": node}))


def call(name: str) -> dict[str, object]:
    schema = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 30}}, "required": ["x"]}
    content = {"type": "json_schema", "json_schema": {**schema, "additionalProperties": False}}
    return {"type": "tag", "begin": f"{TOOL_CALLS}{name}{ARGS}", "content": content, "end": ""}


TRIGGERED = spec({"type": "triggered_tags", "triggers": [TOOL_CALLS], "tags": [call("f"), call("gg")]})
THOUGHTS = spec(
    {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": THINK, "content": {"type": "any_text"}, "end": END_THINK},
            {"type": "regex", "pattern": "[0-9]+"},
        ],
    }
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Over a vocabulary in which every mark is a special token."""
    folder = byte_level_folder(tmp_path_factory.mktemp("marked"), special=(*MARKS, "[INST]"))
    tokenizer = Tokenizer.load(folder)
    return Bench(tokenizer, make_vocabulary(tokenizer))


def ids(bench: Bench, *pieces: str) -> list[int]:
    """Pieces that are special tokens as these, all others in letters."""
    found = []
    for piece in pieces:
        token_id = bench.tokenizer.token_id(piece)
        special = token_id is not None and token_id in bench.tokenizer.special_ids
        letters = bench.tokenizer.encode(piece, add_special_tokens=False, parse_special=False)
        found += [token_id] if special and token_id is not None else letters
    return found


def in_letters(bench: Bench, text: str) -> list[int]:
    return bench.tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def takes(grammar: Grammar, token_ids: list[int]) -> bool:
    """Each token is in its mask and is accepted."""
    state = grammar.start()
    for token_id in token_ids:
        allowed = bool(int(mask_of(state)[token_id // 32]) >> (token_id % 32) & 1)
        assert state.try_accept(token_id) is allowed
        if not allowed:
            return False
    return True


class TestTables:
    def test_marks_have_text_in_one_of_them_and_other_special_tokens_in_none(self, marked: Bench) -> None:
        tokenizer, vocabulary = marked.tokenizer, marked.vocabulary
        plain, with_marks = vocabulary.plain.decoded_vocab, vocabulary.marked.decoded_vocab
        for token_id in tokenizer.special_ids:
            assert plain[token_id] == b""
            text = tokenizer.piece(token_id)
            assert with_marks[token_id] == (text.encode() if text in MARKS else b"")
        ordinary = [i for i in range(len(plain)) if i not in tokenizer.special_ids]
        assert [plain[i] for i in ordinary] == [with_marks[i] for i in ordinary]
        for kind in GrammarKind:
            wanted = vocabulary.marked if kind is GrammarKind.STRUCTURAL_TAG else vocabulary.plain
            assert vocabulary.table(kind) is wanted

    def test_without_special_marks_there_is_one(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.marked is vocabulary.plain
        again = Vocabulary.deserialize(vocabulary.serialize())
        assert again.marked is again.plain

    def test_serialized_they_are_the_same(self, marked: Bench) -> None:
        again = Vocabulary.deserialize(marked.vocabulary.serialize())
        assert again.plain.decoded_vocab == marked.vocabulary.plain.decoded_vocab
        assert again.marked.decoded_vocab == marked.vocabulary.marked.decoded_vocab
        assert again.serialize() == marked.vocabulary.serialize()

    def test_an_end_token_is_never_text(self, marked: Bench) -> None:
        mark = marked.tokenizer.token_id(TOOL_CALLS)
        assert mark is not None
        vocabulary = Vocabulary.of(marked.tokenizer, marked.vocab_size, (END, mark))
        assert vocabulary.marked.decoded_vocab[mark] == b""
        bench = Bench(marked.tokenizer, vocabulary)
        state = bench.compile(THOUGHTS).start()
        for token_id in ids(bench, THINK, "a"):
            state.accept(token_id)
        assert not state.try_accept(mark)

    def test_a_mark_that_cannot_be_drawn_makes_no_second_table(self, marked: Bench) -> None:
        first = min(id_ for mark in MARKS if (id_ := marked.tokenizer.token_id(mark)) in marked.tokenizer.special_ids)
        vocabulary = Vocabulary.of(marked.tokenizer, first, END_IDS)
        assert vocabulary.marked is vocabulary.plain


class TestStructuralTags:
    @pytest.mark.parametrize("source", [TRIGGERED, THOUGHTS, SPECS["tag"]], ids=["triggered", "thoughts", "tag"])
    def test_a_mask_has_exactly_the_tokens_that_can_be_accepted(self, marked: Bench, source: GrammarSpec) -> None:
        grammar = marked.compile(source)
        never = {i for i in marked.tokenizer.special_ids if marked.tokenizer.piece(i) not in MARKS} - {END}
        for seed in range(2):
            output = random_output(grammar, seed, longest=8)
            for count, mask in enumerate(masks_along(grammar, output)):
                can = set(allowed_ids(mask, marked.vocab_size))
                assert can == {i for i in range(marked.vocab_size) if _follows(grammar, output[:count], i)}
                assert not can & never

    @pytest.mark.parametrize(
        "lead",
        [
            (TOOL_CALLS,),
            ("Hm. ", TOOL_CALLS),
            ("Hm. ", "[TOOL_", "CALLS]"),
            ("[TOOL_", TOOL_CALLS),
            ("[", TOOL_CALLS),
            (ARGS, END_THINK, TOOL_CALLS),
            (TOOL_CALLS, "gg", ARGS, '{"x": ""}', TOOL_CALLS),
            (TOOL_CALLS, "gg", ARGS, '{"x": "', TOOL_CALLS, '"}', " and ", TOOL_CALLS),
        ],
    )
    def test_behind_a_trigger_the_call_is_held_however_it_is_spelled(
        self, marked: Bench, lead: tuple[str, ...]
    ) -> None:
        grammar = marked.compile(TRIGGERED)
        for args in ((ARGS,), ("[AR", "GS]")):
            before = ids(marked, *lead, "f", *args)
            assert takes(grammar, [*before, *ids(marked, '{"x": "y"}'), END])
            assert takes(grammar, [*before, *ids(marked, '{"x": "y"}', " then words", TOOL_CALLS, "gg")])
            assert not takes(grammar, [*before, *ids(marked, '{"x": 1}')])
            assert not takes(grammar, [*before, *ids(marked, '{"y": "y"}')])
            assert not takes(grammar, [*before, *ids(marked, '{"x": "y"'), END])
        assert not takes(grammar, ids(marked, *lead, "h"))
        assert not takes(grammar, ids(marked, *lead, "f", TOOL_CALLS))
        assert not takes(grammar, [*ids(marked, *lead), END])

    def test_the_special_token_leaves_only_what_its_letters_leave(self, marked: Bench) -> None:
        grammar = marked.compile(TRIGGERED)
        masks = []
        for before in (ids(marked, "a", TOOL_CALLS), in_letters(marked, f"a{TOOL_CALLS}")):
            state = grammar.start()
            for token_id in before:
                state.accept(token_id)
            masks.append(allowed_ids(mask_of(state), marked.vocab_size))
        assert masks[0] == masks[1] and 0 < len(masks[0]) < 10

    def test_thoughts_end_with_the_mark_however_it_is_spelled(self, marked: Bench) -> None:
        grammar = marked.compile(THOUGHTS)
        for begin in (ids(marked, THINK), in_letters(marked, THINK)):
            for inside in (("Hm",), ("</thi",), (TOOL_CALLS, "f", ARGS, "{}"), (THINK,), ("<", "/think ")):
                thought = [*begin, *ids(marked, *inside)]
                assert takes(grammar, [*thought, *ids(marked, END_THINK, "12"), END])
                assert takes(grammar, [*thought, *in_letters(marked, f"{END_THINK}12"), END])
                assert not takes(grammar, [*thought, *ids(marked, END_THINK, "a")])
                assert not takes(grammar, [*thought, *ids(marked, END_THINK, END_THINK)])
                assert not takes(grammar, [*thought, END])


def _follows(grammar: Grammar, path: list[int], token_id: int) -> bool:
    state = grammar.start()
    return all(state.try_accept(token) for token in (*path, token_id))


class TestOtherKinds:
    @pytest.mark.parametrize(
        ("source", "lead"),
        [
            (GrammarSpec(GrammarKind.EBNF, r'root ::= "[TOOL_CALLS]x" | [^\n]*'), ""),
            (GrammarSpec(GrammarKind.EBNF, 'root ::= "[TOOL_CALLS]" | [a-z]+'), ""),
            (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "string"}'), '"'),
        ],
        ids=["any text", "letters", "schema"],
    )
    def test_a_mark_is_text_in_letters_alone(self, marked: Bench, source: GrammarSpec, lead: str) -> None:
        grammar = marked.compile(source)
        before = in_letters(marked, lead)
        assert takes(grammar, [*before, *in_letters(marked, TOOL_CALLS)])
        for mark in MARKS:
            [token_id] = ids(marked, mark)
            assert not takes(grammar, [*before, token_id])


class TestFromProcessToProcess:
    @pytest.fixture(scope="class")
    def compiler(self, marked: Bench) -> Iterator[GrammarCompiler]:
        made = GrammarCompiler(marked.vocabulary, on_fatal=no_bugs)
        made.start()
        yield made
        made.close()

    @pytest.mark.parametrize("source", [*SPECS.values(), TRIGGERED], ids=[*SPECS, "marks"])
    def test_the_table_of_its_kind_everywhere(
        self, marked: Bench, compiler: GrammarCompiler, source: GrammarSpec
    ) -> None:
        here, there = marked.compile(source), compiler.compile(source).result(PATIENCE)
        loader = GrammarLoader(make_vocabulary(marked.tokenizer))
        loaded = loader.load(source.kind, there.serialized).result(PATIENCE)
        loader.close()
        output = random_output(here, seed=5)
        for made in (there, loaded):
            pairs = zip(masks_along(made, output), masks_along(here, output), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)

    def test_bytes_that_were_loaded_as_one_kind_are_not_kept_for_another(self, marked: Bench) -> None:
        """The tables differ, and so do the masks."""
        loader = GrammarLoader(marked.vocabulary)
        serialized = marked.compile(TRIGGERED).serialized
        first = loader.load(GrammarKind.STRUCTURAL_TAG, serialized).result(PATIENCE)
        # Whether the library notices that the table is another one is left to it.
        with contextlib.suppress(InvalidRequest):
            assert loader.load(GrammarKind.EBNF, serialized).result(PATIENCE) is not first
        assert loader.load(GrammarKind.STRUCTURAL_TAG, serialized).result(PATIENCE) is first
        loader.close()

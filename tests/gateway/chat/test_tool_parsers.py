"""Calls are read from any cut of the text, streamed as written, and nothing that is no call gets lost."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.parts import ToolCallArguments, ToolCallStart
from gateway.chat.tools.format import ToolFormat
from gateway.chat.tools.hermes import HermesFormat
from gateway.chat.tools.llama3 import Llama3Format
from gateway.chat.tools.mistral import MistralFormat
from tests.gateway.chat.reading import Heard, cut, hear

HERMES, LLAMA, MISTRAL = HermesFormat(), Llama3Format(), MistralFormat()
NAMES = ("f", "get_weather", "g-2")
FORMATS: list[ToolFormat] = [HERMES, LLAMA, MISTRAL]

Call = tuple[str, str]


def read(format_: ToolFormat, text: str, *places: int, parallel: bool = True) -> Heard:
    return hear(format_.new_parser(NAMES, parallel=parallel), cut(text, places))


def letter_by_letter(format_: ToolFormat, text: str) -> Heard:
    return hear(format_.new_parser(NAMES, parallel=True), list(text))


F = '{"city": "Paris"}'
#: (format, what the model writes, text, calls)
GOLDEN: list[tuple[ToolFormat, str, str, list[Call]]] = [
    # Hermes
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>', "", [("f", F)]),
    (HERMES, 'Sure.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', "Sure.", [("f", "{}")]),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": { "a" :[1,{"b":"}"}] } }\n</tool_call>',
        "",
        [("f", "{}"), ("g", '{ "a" :[1,{"b":"}"}] }')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> Done. ', "Done. ", [("f", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"city": "Paris"}, "name": "f"}</tool_call>', "", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f", "parameters": {"city": "Paris"}}</tool_call>', "", [("f", F)]),
    (HERMES, '<tool_call>{"id": 1, "name": "f", "arguments": {"city": "Paris"}}</tool_call>', "", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"city": "Paris"}</tool_call>', "", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}', "", [("f", F)]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"city": "Par', "", [("f", '{"city": "Par')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>bye', "bye", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', "", [("f", '{"a": tru}')]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    (HERMES, "Use <tool_call> like this.", "Use <tool_call> like this.", []),
    (HERMES, "a </tool_call> b", "a </tool_call> b", []),
    (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (HERMES, '<tool_call>{"nome": 1}</tool_call>', '<tool_call>{"nome": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>', "", []),
    (HERMES, '<tool_call>{"name": "f</tool_call>', '<tool_call>{"name": "f</tool_call>', []),
    (HERMES, '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    (HERMES, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    (HERMES, "  hi\n\n", "  hi\n\n", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    # Llama 3
    (LLAMA, '{"name": "f", "parameters": {"city": "Paris"}}', "", [("f", F)]),
    (LLAMA, '\n {"type": "function", "name": "f", "parameters": {"city": "Paris"}}', "", [("f", F)]),
    (LLAMA, '<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g-2", "parameters": {"a": 1}}',
        "",
        [("f", "{}"), ("g-2", '{"a": 1}')],
    ),
    (LLAMA, '{"name": "f", "parameters": {}}\n{"name": "f", "arguments": {}}', "", [("f", "{}"), ("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}}; and more', "; and more", [("f", "{}")]),
    (LLAMA, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, ' {"name": "Ada"} ', ' {"name": "Ada"} ', []),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
    (LLAMA, 'Let me see. <|python_tag|>{"name": "f", "parameters": {}}', "Let me see.", [("f", "{}")]),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    (LLAMA, '{"name": "f", "parameters": {"a": "b', "", [("f", '{"a": "b')]),
    (LLAMA, "  hi\n\n", "  hi\n\n", []),
    # Mistral
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris"}}]', "", [("f", F)]),
    (MISTRAL, '[TOOL_CALLS] [{"arguments": {"city": "Paris"}, "name": "f"}]', "", [("f", F)]),
    (
        MISTRAL,
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": []}} ] ok',
        "Hm.ok",
        [("f", "{}"), ("g", '{"a": []}')],
    ),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"city": "Paris"}', "", [("f", F)]),
    (MISTRAL, '[TOOL_CALLS]f{"city": "Paris"}[TOOL_CALLS]g[ARGS]{}', "", [("f", F), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"city": "Paris"}', "", [("f", F)]),
    (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {"city": "Paris"}}', "", [("f", F)]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"city": "Par', "", [("f", '{"city": "Par')]),
    (MISTRAL, "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    (MISTRAL, "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (MISTRAL, "  hi\n\n", "  hi\n\n", []),
]


@pytest.mark.parametrize(("format_", "written", "text", "calls"), GOLDEN)
def test_golden(format_: ToolFormat, written: str, text: str, calls: list[Call]) -> None:
    if not calls:
        text = written
    for heard in (read(format_, written), letter_by_letter(format_, written)):
        assert (heard.text, heard.calls) == (text, calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text('ab"\\{}[]<>/tool_call \n;é', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{<", max_size=3), inner, max_size=3),
    max_leaves=6,
)
arguments = st.builds(
    lambda value, indent: json.dumps(value, indent=indent, ensure_ascii=False),
    st.dictionaries(st.text('abc"}', max_size=3), json_values, max_size=3),
    st.none() | st.just(2),
)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
#: Text around calls that does not begin or end with blanks and holds no mark.
words = st.text("abc {}\"'<>[]|;:,\n.", max_size=20).map(str.strip)


def hermes_text(called: list[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in called)


def llama_text(called: list[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in called)


def mistral_text(called: list[Call]) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in called) + "]"


def mistral_named_text(called: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in called)


WRITERS: list[tuple[ToolFormat, Callable[[list[Call]], str]]] = [
    (HERMES, hermes_text),
    (LLAMA, llama_text),
    (MISTRAL, mistral_text),
    (MISTRAL, mistral_named_text),
]


@given(st.sampled_from(WRITERS), words, calls, st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_calls_at_any_cut(
    writer: tuple[ToolFormat, Callable[[list[Call]], str]],
    before: str,
    called: list[Call],
    places: list[int],
    parallel: bool,
) -> None:
    format_, write = writer
    if format_ is LLAMA:
        before = ""  # bare calls come first
    written = before + ("\n" if before else "") + write(called)
    heard = read(format_, written, *places, parallel=parallel)
    assert heard.text == before
    assert heard.calls == (called if parallel else called[:1])
    assert len(set(heard.ids)) == len(heard.ids)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": {}}',
    '{"arguments": {"a": 1}, ',
    '"name": "f"}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ";",
    " ",
    "\n",
    "f",
    "name",
    "1",
]
garbage = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@given(st.sampled_from(FORMATS), garbage, st.lists(st.integers(0, 120), max_size=10))
def test_garbage_does_not_depend_on_cuts_and_is_kept(format_: ToolFormat, written: str, places: list[int]) -> None:
    whole, pieces, letters = (
        read(format_, written),
        read(format_, written, *places),
        letter_by_letter(format_, written),
    )
    for other in (pieces, letters):
        assert (other.text, other.calls, other.order) == (whole.text, whole.calls, whole.order)
    if not whole.calls:
        assert whole.text == written


@pytest.mark.parametrize(("format_", "write"), WRITERS)
def test_arguments_stream_as_they_come(format_: ToolFormat, write: Callable[[list[Call]], str]) -> None:
    parser = format_.new_parser(NAMES, parallel=True)
    written = write([("f", '{"city": "Paris"}')])
    begun, told = False, ""
    for character in written:
        for part in parser.push(character):
            if isinstance(part, ToolCallStart):
                begun = True
            elif isinstance(part, ToolCallArguments):
                told += part.text
        if begun and len(told) < len(F):
            assert told and written[: written.index(F) + len(told)].endswith(told)
            assert told[-1] == character, "an argument's character waited"
    assert told == F


@pytest.mark.parametrize("format_", FORMATS)
def test_only_what_may_be_a_mark_waits(format_: ToolFormat) -> None:
    parser = format_.new_parser(NAMES, parallel=True)
    heard = Heard()
    for word in ("Once", " upon", " a", " time", ","):
        heard.add(parser.push(word))
    assert heard.text == "Once upon a time,"


def test_json_answers_are_not_held_back() -> None:
    parser = LLAMA.new_parser(NAMES, parallel=True)
    heard = Heard()
    heard.add(parser.push('{"answer": '))
    assert heard.text == '{"answer":'


@pytest.mark.parametrize(
    ("format_", "pattern"), [(HERMES, "call_[0-9a-f]{24}"), (LLAMA, "call_[0-9a-f]{24}"), (MISTRAL, "[a-zA-Z0-9]{9}")]
)
def test_ids(format_: ToolFormat, pattern: str) -> None:
    write: dict[str, Any] = {"hermes": hermes_text, "llama3": llama_text, "mistral": mistral_text}
    heard = read(format_, write[format_.name]([("f", "{}"), ("f", "{}")]))
    assert len(set(heard.ids)) == 2
    assert all(re.fullmatch(pattern, id_) for id_ in heard.ids)
    assert all(format_.template_id(id_) == id_ for id_ in heard.ids)


def test_mistral_templates_get_ids_of_nine_letters() -> None:
    ids = [MISTRAL.template_id(f"call_{number}") for number in range(100)]
    assert len(set(ids)) == 100 and all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert MISTRAL.template_id("call_7") == ids[7]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "\\udfff"}',
        '{"arguments": {}, "name": "\\ud800"}',
    ],
)
def test_what_is_no_text_is_no_call(call: str) -> None:
    """A half of a surrogate pair, which JSON can spell, could not be sent to any client."""
    heard = read(HERMES, f"<tool_call>{call}</tool_call>")
    assert (heard.text, heard.calls) == (f"<tool_call>{call}</tool_call>", [])

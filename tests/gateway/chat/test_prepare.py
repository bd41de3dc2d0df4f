"""Grammars hold the model to calls that the parser reads; parsers and kept tokens fit model and request."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.errors import InvalidRequest
from common.sampling import GrammarKind, GrammarSpec
from gateway.chat.fields import ChatFields
from gateway.chat.prepare import PreparedChat, prepare_chat
from gateway.chat.request import ChatInput, Tool, ToolChoice, ToolMode, Turn
from gateway.generation import ServingLimits
from gateway.options import GenerationOptions
from gateway.serving import ServingModel
from tests.gateway.chat.grammars import accepts, random_text
from tests.gateway.chat.reading import hear
from tests.gateway.chat.templates import MISTRAL_MARKS, TEMPLATES, VOCAB_SIZE, chat_model

LIMITS = ServingLimits(16384, VOCAB_SIZE)
REQUIRED, AUTO, NONE = ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.AUTO), ToolChoice(ToolMode.NONE)
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["°C", 'a"b', "</tool_call>"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool("f", "first", CITY), Tool("f-2", "second", {"type": "object", "properties": {}}))
#: Free thoughts would hardly end by themselves.
THOUGHTS = {"r1": "Hm</think>", "qwen thinking": "<think>Hm</think>"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServingModel]:
    """With ordinary tokens only, as grammars are about text."""
    return {name: chat_model(tmp_path_factory.mktemp("model"), source) for name, source in TEMPLATES.items()}


async def prepared(model: ServingModel, grammar: GrammarSpec | None = None, **options: Any) -> PreparedChat:
    chat = ChatInput(**{"turns": (Turn("user", "hi"),), "tools": TOOLS} | options)
    return await prepare_chat(model, chat, GenerationOptions(grammar=grammar), LIMITS, request_id="r")


def grammar_of(chat: PreparedChat) -> GrammarSpec | None:
    return chat.prepared.generation.params.grammar


def check_calls(chat: PreparedChat, text: str) -> list[tuple[str, str]]:
    """The calls in a text that the grammar has let through, each of which must be sound."""
    heard = hear(chat.new_parser(), list(text))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in heard.calls:
        jsonschema.validate(json.loads(arguments), schemas[name])
    return heard.calls


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice(ToolMode.REQUIRED, "f"), ToolChoice(ToolMode.REQUIRED, "f-2")])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_forced_calls_are_what_the_parser_reads(
    models: dict[str, ServingModel], name: str, choice: ToolChoice, parallel: bool
) -> None:
    chat = await prepared(models[name], tool_choice=choice, parallel_tool_calls=parallel)
    counts = set()
    for seed in range(12):
        text = random_text(grammar_of(chat), seed, start=THOUGHTS.get(name, ""))
        heard = hear(chat.new_parser(), list(text))
        assert heard.text == ""
        calls = check_calls(chat, text)
        counts.add(len(calls))
        assert {called for called, _ in calls} <= ({choice.function} if choice.function else {"f", "f-2"})
    assert min(counts) == 1
    assert (max(counts) > 1) == (parallel and choice.function is None)
    assert not accepts(grammar_of(chat), "")
    assert not accepts(grammar_of(chat), "Hello")


#: How each family writes a call of f.
WRITTEN = {
    "chatml": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "qwen": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]',
    "mistral named": "[TOOL_CALLS]f[ARGS]{}",
    "mistral ids": "[TOOL_CALLS]f[CALL_ID]aBc456789[ARGS]{}",
}


@pytest.mark.parametrize("name", WRITTEN)
async def test_strict_functions_are_held_once_a_call_begins(models: dict[str, ServingModel], name: str) -> None:
    strict = (replace(TOOLS[0], strict=True), TOOLS[1])
    grammar = grammar_of(await prepared(models[name], tools=strict))
    call = WRITTEN[name].format
    good, bad = '{"city": "Paris", "days": [1]}', '{"town": "Paris"}'
    assert accepts(grammar, "Just words {}.")
    assert accepts(grammar, call(good))
    assert not accepts(grammar, call(bad))
    assert accepts(grammar, "Well: " + call(good) + " and so on")
    assert not accepts(grammar, "Well: " + call(bad))
    loose = call(bad).replace("f", "f-2", 1)
    assert accepts(grammar, loose)
    one = grammar_of(await prepared(models[name], tools=strict, parallel_tool_calls=False))
    assert accepts(one, "Well: " + call(good))
    assert not accepts(one, call(good) + call(good))


async def test_without_strict_functions_auto_is_free(models: dict[str, ServingModel]) -> None:
    for options in ({}, {"tool_choice": AUTO}, {"tool_choice": NONE}, {"parallel_tool_calls": False}):
        assert grammar_of(await prepared(models["qwen"], **options)) is None


JSON = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}')
ASKED = [
    (JSON, '{"a": 1}', "Hi"),
    (GrammarSpec(GrammarKind.EBNF, 'root ::= "x" | "y" root'), "yyx", "yy"),
    (
        GrammarSpec(
            GrammarKind.STRUCTURAL_TAG,
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "hey"}}',
        ),
        "hey",
        "hi",
    ),
]


@pytest.mark.parametrize(("asked", "good", "bad"), ASKED)
async def test_structured_output_or_calls(
    models: dict[str, ServingModel], asked: GrammarSpec, good: str, bad: str
) -> None:
    grammar = grammar_of(await prepared(models["qwen"], asked))
    call = WRITTEN["qwen"].format('{"city": "Paris", "days": []}')
    assert accepts(grammar, good) and not accepts(grammar, bad)
    assert accepts(grammar, call) and not accepts(grammar, good + call)
    forced = grammar_of(await prepared(models["qwen"], asked, tool_choice=REQUIRED))
    assert accepts(forced, call) and not accepts(forced, good)
    assert grammar_of(await prepared(models["qwen"], asked, tools=())) is asked
    assert grammar_of(await prepared(models["qwen"], asked, tool_choice=NONE)) is asked


@pytest.mark.parametrize(("asked", "good", "bad"), ASKED)
async def test_structured_output_begins_behind_the_thoughts(
    models: dict[str, ServingModel], asked: GrammarSpec, good: str, bad: str
) -> None:
    opened = await prepared(models["r1"], asked, tools=())
    assert accepts(grammar_of(opened), f"Hm {{}} <b>.\n</think>\n\n{good}")
    assert accepts(grammar_of(opened), f"</think>{good}")
    assert not accepts(grammar_of(opened), f"Hm</think>\n\n{bad}")
    assert not accepts(grammar_of(opened), "Hm")
    heard = hear(opened.new_parser(), [f"Hm.\n</think>\n\n{good}"])
    assert (heard.reasoning, heard.text) == ("Hm.", good)
    free = await prepared(models["qwen thinking"], asked, tools=())
    for text, fits in ((good, True), (f"<think>\nHm.\n</think>\n\n{good}", True), (bad, False), ("<think>", False)):
        assert accepts(grammar_of(free), text) is fits
    closed = await prepared(models["qwen thinking"], asked, tools=(), template_variables={"enable_thinking": False})
    assert grammar_of(closed) is asked
    assert hear(closed.new_parser(), ["<think>a</think>"]).text == "<think>a</think>"


async def test_forced_calls_come_behind_the_thoughts(models: dict[str, ServingModel]) -> None:
    chat = await prepared(models["r1"], tool_choice=REQUIRED)
    call = WRITTEN["qwen"].format('{"city": "Paris", "days": []}')
    text = f"<tool_call> maybe?\n</think>\n\n{call}"
    assert accepts(grammar_of(chat), text)
    heard = hear(chat.new_parser(), list(text))
    assert (heard.reasoning, heard.text, len(heard.calls)) == ("<tool_call> maybe?", "", 1)


@pytest.mark.parametrize(
    ("content", "reasoning", "text"),
    [
        ("<think>\nHm", "", None),
        ("<think>\nHm\n</think>\n\nSo", "", "more</think>x"),
        ("So", "", "more</think>x"),
    ],
)
async def test_thoughts_of_a_continued_message(
    models: dict[str, ServingModel], content: str, reasoning: str, text: str | None
) -> None:
    turns = (Turn("user", "What does <think> mean?"), Turn("assistant", content))
    chat = await prepared(models["r1"], turns=turns, tools=(), continue_final_message=True)
    heard = hear(chat.new_parser(), ["more</think>x"])
    assert (heard.reasoning, heard.text) == (("more", "x") if text is None else (reasoning, text))


async def test_thoughts_may_stay_in_the_text(models: dict[str, ServingModel], tmp_path: Path) -> None:
    written = "<think>\nHm.\n</think>\n\nYes."
    chat = await prepared(models["qwen thinking"], separate_reasoning=False)
    assert hear(chat.new_parser(), [written]).text == written
    off = chat_model(tmp_path, TEMPLATES["qwen thinking"], reasoning_parser="none")
    assert hear((await prepared(off)).new_parser(), [written]).text == written


async def test_marks_that_are_special_tokens_reach_the_parser(models: dict[str, ServingModel], tmp_path: Path) -> None:
    model = chat_model(tmp_path, TEMPLATES["mistral"], MISTRAL_MARKS)
    kept = (await prepared(model)).prepared.text.kept_special_ids
    assert kept == {model.tokenizer.token_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}
    for options in ({"tools": ()}, {"tool_choice": NONE}):
        assert not (await prepared(model, **options)).prepared.text.kept_special_ids
    assert not (await prepared(models["qwen"])).prepared.text.kept_special_ids


async def test_without_tools_calls_are_text(models: dict[str, ServingModel]) -> None:
    written = WRITTEN["qwen"].format("{}")
    for options in ({"tools": ()}, {"tool_choice": NONE}):
        heard = hear((await prepared(models["qwen"], **options)).new_parser(), [written])
        assert (heard.text, heard.calls) == (written, [])


def tools(*names: str) -> tuple[Tool, ...]:
    return tuple(Tool(name) for name in names)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tools": tools("")}, "tools[0].function.name"),
    ({"tools": tools("f", "a b")}, "tools[1].function.name"),
    ({"tools": tools("a.b")}, "tools[0].function.name"),
    ({"tools": tools("f\n")}, "tools[0].function.name"),
    ({"tools": tools("x" * 65)}, "tools[0].function.name"),
    ({"tools": tools("f", "g", "f")}, "tools[2].function.name"),
    ({"tools": tools(*(f"f{i}" for i in range(129)))}, "tools"),
    ({"tools": (Tool("f", parameters={"type": "array"}),)}, "tools[0].function.parameters"),
    ({"tools": (Tool("f", parameters={"type": None}),)}, "tools[0].function.parameters"),
    ({"tools": (), "tool_choice": REQUIRED}, "tool_choice"),
    ({"tools": (), "tool_choice": AUTO}, "tool_choice"),
    ({"tool_choice": ToolChoice(ToolMode.REQUIRED, "g")}, "tool_choice"),
    ({"turns": ()}, "messages"),
    ({"turns": (Turn("function", "x", name="f"),)}, "messages[0].role"),
    ({"turns": (Turn("user", None),)}, "messages[0].content"),
    ({"turns": (Turn("tool", "x"),)}, "messages[0].tool_call_id"),
    ({"turns": (Turn("tool", None, tool_call_id="1"),)}, "messages[0].content"),
    ({"turns": (Turn("user", "x", tool_call_id="1"),)}, "messages[0].tool_call_id"),
    ({"template_variables": {"tools": 1}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("options", "field"), MISTAKES)
async def test_mistakes_are_named(models: dict[str, ServingModel], options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prepared(models["qwen"], **options)
    assert caught.value.field == field


NOT_ENFORCEABLE = {
    "type": "object",
    "properties": {"a": {"type": "string", "contentEncoding": "base64", "not": {"const": "x"}}},
}


async def test_strict_schemas_are_enforced_whole_or_refused(models: dict[str, ServingModel]) -> None:
    for choice in (AUTO, REQUIRED):
        with pytest.raises(InvalidRequest) as caught:
            await prepared(models["qwen"], tools=(TOOLS[1], Tool("g", None, NOT_ENFORCEABLE, True)), tool_choice=choice)
        assert caught.value.field == "tools[1].function.parameters"
    loose = (Tool("f", None, NOT_ENFORCEABLE),)
    forced = grammar_of(await prepared(models["qwen"], tools=loose, tool_choice=REQUIRED))
    assert accepts(forced, WRITTEN["qwen"].format('{"a": "b"}'))
    assert not accepts(forced, WRITTEN["qwen"].format('{"a": 5}'))
    assert grammar_of(await prepared(models["qwen"], tools=loose)) is None


async def test_schemas_with_definitions_of_the_same_names(models: dict[str, ServingModel]) -> None:
    """Each function's definitions are its own, recursive ones too."""

    def tree(name: str, kind: str) -> Tool:
        node = {"type": "object", "properties": {"v": {"type": kind}, "next": {"$ref": "#/$defs/node"}}}
        return Tool(
            name, None, {"$defs": {"node": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}}
        )

    both = (tree("f", "integer"), tree("g", "boolean"))
    grammar = grammar_of(await prepared(models["mistral named"], tools=both, tool_choice=REQUIRED))
    for name, good, bad in (("f", "1", "true"), ("g", "true", "1")):
        nested = '[TOOL_CALLS]{}[ARGS]{{"root": {{"v": {}, "next": {{"v": {}}}}}}}'
        assert accepts(grammar, nested.format(name, good, good))
        assert not accepts(grammar, nested.format(name, good, bad))


async def test_names_of_another_api(models: dict[str, ServingModel]) -> None:
    fields = ChatFields(
        messages="input", turns=("instructions", "input[3]"), function="", tools=("tools[5]",), max_tokens="most"
    )

    async def field_of(chat: ChatInput, **options: Any) -> str | None:
        with pytest.raises(InvalidRequest) as caught:
            await prepare_chat(
                models["qwen"], chat, GenerationOptions(**options), LIMITS, request_id="r", fields=fields
            )
        return caught.value.field

    turns = (Turn("system", "x"), Turn("user", "x"))
    assert await field_of(ChatInput(turns=(turns[0], Turn("user", None)))) == "input[3].content"
    assert await field_of(ChatInput(turns=turns, tools=tools("a b"))) == "tools[5].name"
    assert await field_of(ChatInput(turns=()), max_tokens=5) == "input"
    assert await field_of(ChatInput(turns=(turns[0], Turn("user", "x" * 10**6)))) == "input"
    assert await field_of(ChatInput(turns=turns), max_tokens=0) == "most"


async def test_a_function_without_schema_takes_any_object(models: dict[str, ServingModel]) -> None:
    for parameters in (None, {}, {"properties": {"a": {}}}):
        anything = (Tool("f", parameters=parameters),)
        grammar = grammar_of(await prepared(models["mistral named"], tools=anything, tool_choice=REQUIRED))
        assert accepts(grammar, '[TOOL_CALLS]f[ARGS]{"a": [1, {}]}')
        assert not accepts(grammar, "[TOOL_CALLS]f[ARGS]5")

"""Models whose marks are special tokens: held as others are, whether they write the token or its letters."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.sampling import GrammarKind, GrammarSpec
from common.text.marks import ARGS, CALL_ID, END_THINK, END_TOOL_CALL, MARKS, PYTHON_TAG, THINK, TOOL_CALL, TOOL_CALLS
from gateway.chat.prepare import PreparedChat, prepare_chat
from gateway.chat.request import ChatInput, Tool, ToolChoice, ToolMode, Turn
from gateway.generation import ServingLimits
from gateway.options import GenerationOptions
from tests.gateway.chat.special_tokens import Worker, heard
from tests.gateway.chat.templates import TEMPLATES, VOCAB_SIZE, chat_model

LIMITS = ServingLimits(16384, VOCAB_SIZE)
REQUIRED = ToolChoice(ToolMode.REQUIRED)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 14}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
#: Names that begin alike, and a function without parameters.
TOOLS = (Tool("f", "first", CITY), Tool("f-2", "second", {"type": "object", "additionalProperties": False}))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
JSON = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(CITY))


@dataclass(frozen=True)
class Family:
    """How a family writes, and which marks its calls cannot be without."""

    template: str
    call: str
    needed: tuple[str, ...]
    #: Other ways to write the same.
    other: tuple[str, ...] = ()


HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
LISTED = '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]'
LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
NAMED = "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"
FAMILIES = {
    "qwen": Family(TEMPLATES["qwen"], HERMES, (TOOL_CALL, END_TOOL_CALL)),
    "chatml": Family(TEMPLATES["chatml"], HERMES, (TOOL_CALL, END_TOOL_CALL)),
    "mistral": Family(TEMPLATES["mistral"], LISTED, (TOOL_CALLS,), (LISTED.replace("][", "] ["),)),
    "mistral named": Family(TEMPLATES["mistral named"], NAMED, (TOOL_CALLS, ARGS)),
    "mistral ids": Family(
        TEMPLATES["mistral ids"], NAMED.replace("[A", "[CALL_ID]aBc456789[A"), (TOOL_CALLS, CALL_ID, ARGS), (NAMED,)
    ),
    "llama": Family(TEMPLATES["llama"], PYTHON_TAG + LLAMA, (PYTHON_TAG,), (LLAMA,)),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
either_spelling = pytest.mark.parametrize("special", [True, False], ids=["tokens", "letters"])


@dataclass(frozen=True)
class Served:
    """A model and what runs it."""

    model: Any
    worker: Worker

    async def prepared(self, grammar: GrammarSpec | None = None, **options: Any) -> PreparedChat:
        chat = ChatInput(**{"turns": (Turn("user", "hi"),), "tools": TOOLS} | options)
        return await prepare_chat(self.model, chat, GenerationOptions(grammar=grammar), LIMITS, request_id="r")

    def takes(self, chat: PreparedChat, text: str, *, special: bool, ends: bool = True) -> bool:
        end = [self.worker.end] if ends else []
        return self.worker.takes(grammar_of(chat), [*self.worker.ids(text, special=special), *end])


def serve(folder: Path, template: str) -> Served:
    model = chat_model(folder, template, MARKS)
    return Served(model, Worker(model))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Models of which every mark is a special token, those of other families too. Calls only: no thoughts."""
    found = {}
    for name, family in FAMILIES.items():
        model = chat_model(tmp_path_factory.mktemp("model"), family.template, MARKS, reasoning_parser="none")
        found[name] = Served(model, Worker(model))
    return found


def grammar_of(chat: PreparedChat) -> GrammarSpec | None:
    return chat.prepared.generation.params.grammar


def sound_calls(chat: PreparedChat, worker: Worker, ids: Sequence[int]) -> list[tuple[str, str]]:
    """The calls that a client hears of, which do not depend on how the tokens came and are all sound."""
    calls = heard(chat, worker.tokenizer, ids).calls
    assert heard(chat, worker.tokenizer, ids, *range(1, len(ids))).calls == calls
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])
    return calls


def written(family: Family, arguments: Any, name: str = "f", template: str | None = None) -> str:
    return (template or family.call).replace("NAME", name).replace("ARGUMENTS", json.dumps(arguments))


@every_family
@pytest.mark.parametrize("parallel", [True, False])
async def test_forced_calls_of_a_model_that_likes_its_marks(
    served: dict[str, Served], name: str, parallel: bool
) -> None:
    here = served[name]
    chat = await here.prepared(tool_choice=REQUIRED, parallel_tool_calls=parallel)
    liked = {here.worker.special(mark) for mark in MARKS}
    used: set[int] = set()
    most = 0
    for seed in range(10):
        ids = here.worker.answer(grammar_of(chat), seed, liked=liked)
        assert heard(chat, here.worker.tokenizer, ids).text == ""
        calls = sound_calls(chat, here.worker, ids)
        assert calls and (parallel or len(calls) == 1)
        used.update(ids)
        most = max(most, len(calls))
    assert used >= {here.worker.special(mark) for mark in FAMILIES[name].needed}
    assert (most > 1) is parallel


@every_family
async def test_forced_calls_of_a_model_that_never_writes_them(served: dict[str, Served], name: str) -> None:
    here = served[name]
    chat = await here.prepared(tool_choice=REQUIRED)
    for seed in range(6):
        ids = here.worker.answer(grammar_of(chat), seed, liked=set())
        assert not set(ids) & {here.worker.special(mark) for mark in MARKS}
        assert sound_calls(chat, here.worker, ids) and heard(chat, here.worker.tokenizer, ids).text == ""


@every_family
@either_spelling
async def test_forced_calls_are_those_of_the_family(served: dict[str, Served], name: str, special: bool) -> None:
    here, family = served[name], FAMILIES[name]
    chat = await here.prepared(tool_choice=REQUIRED)
    for template in (family.call, *family.other):
        text = written(family, {"city": "Paris"}, template=template)
        assert here.takes(chat, text, special=special)
        assert sound_calls(chat, here.worker, here.worker.ids(text, special=special)) == [("f", '{"city": "Paris"}')]
        assert not here.takes(chat, written(family, {"town": "Paris"}, template=template), special=special)
        assert not here.takes(chat, written(family, {}, "g", template), special=special)
    for wrong in ("Hello", "", THINK, f"{THINK}a{END_THINK}"):
        assert not here.takes(chat, wrong, special=special)


@every_family
@either_spelling
async def test_strict_functions_are_held_once_a_call_begins(
    served: dict[str, Served], name: str, special: bool
) -> None:
    here, family = served[name], FAMILIES[name]
    chat = await here.prepared(tools=(replace(TOOLS[0], strict=True), TOOLS[1]))
    good, bad = {"city": "Paris"}, {"town": "Paris"}
    assert here.takes(chat, "Just words.", special=special)
    for template in (family.call, *family.other):
        for lead in ("", "Well: ", f"{THINK}Hm{END_THINK}"):
            text = lead + written(family, good, template=template)
            assert here.takes(chat, text, special=special)
            assert len(sound_calls(chat, here.worker, here.worker.ids(text, special=special))) == (
                # A bare object is a call at the answer's beginning only.
                0 if lead and template is LLAMA else 1
            )
            assert not here.takes(chat, lead + written(family, bad, template=template), special=special)
            assert here.takes(chat, lead + written(family, {}, "f-2", template), special=special)
    for mark in family.needed[:1]:
        assert not here.takes(chat, f"So {mark}what?", special=special)


@every_family
async def test_strict_functions_in_random_answers(served: dict[str, Served], name: str) -> None:
    here, family = served[name], FAMILIES[name]
    chat = await here.prepared(tools=tuple(replace(tool, strict=True) for tool in TOOLS))
    liked = {here.worker.special(mark) for mark in family.needed}
    count = 0
    for seed in range(12):
        count += len(sound_calls(chat, here.worker, here.worker.answer(grammar_of(chat), seed, liked=liked)))
    assert count > 0


@every_family
@either_spelling
@pytest.mark.parametrize("mark", MARKS)
async def test_a_mark_in_a_string_of_a_call_is_text(
    served: dict[str, Served], name: str, special: bool, mark: str
) -> None:
    here, family = served[name], FAMILIES[name]
    arguments = {"city": mark}
    text = written(family, arguments)
    for chat in (
        await here.prepared(tool_choice=REQUIRED),
        await here.prepared(tools=(replace(TOOLS[0], strict=True),)),
    ):
        assert here.takes(chat, text, special=special)
        [(_, heard_arguments)] = sound_calls(chat, here.worker, here.worker.ids(text, special=special))
        assert json.loads(heard_arguments) == arguments


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The prompt opens the thoughts."""
    return serve(tmp_path_factory.mktemp("r1"), TEMPLATES["r1"])


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """It may think."""
    return serve(tmp_path_factory.mktemp("qwen"), TEMPLATES["qwen thinking"])


ANSWERS = [
    ({"tools": (), "grammar": JSON}, '{"city": "Paris"}', '{"town": "Paris"}'),
    ({"tool_choice": REQUIRED}, written(FAMILIES["qwen"], {"city": "Paris"}), "Paris"),
    ({"grammar": JSON}, written(FAMILIES["qwen"], {"city": "Paris"}), written(FAMILIES["qwen"], ["Paris"])),
    ({"grammar": JSON}, '{"city": "Paris"}', "Paris"),
]


@either_spelling
@pytest.mark.parametrize(("options", "good", "bad"), ANSWERS)
async def test_an_answer_is_held_behind_the_thoughts(
    opened: Served, free: Served, options: dict[str, Any], good: str, bad: str, special: bool
) -> None:
    for here, begin in ((opened, ""), (free, THINK)):
        chat = await here.prepared(**options)
        for thought in ("Hm.", "", "</thin", f"{TOOL_CALL} or {TOOL_CALLS}f{ARGS}?"):
            lead = f"{begin}{thought}{END_THINK}\n\n"
            ids = here.worker.ids(lead + good, special=special)
            assert here.takes(chat, lead + good, special=special)
            assert not here.takes(chat, lead + bad, special=special)
            assert not here.takes(chat, f"{begin}{thought}", special=special)
            message = heard(chat, here.worker.tokenizer, ids)
            assert message.reasoning == thought
            assert message.text == ("" if message.calls else good) and len(message.calls) == good.startswith(TOOL_CALL)
        assert not here.takes(chat, f"{begin}a{END_THINK}b{END_THINK}{good}", special=special)
    assert here.takes(chat, good, special=special)


@pytest.mark.parametrize(("options", "good", "bad"), ANSWERS[:2])
async def test_random_thoughts_end_with_the_special_token(
    opened: Served, free: Served, options: dict[str, Any], good: str, bad: str
) -> None:
    for here in (opened, free):
        chat = await here.prepared(**options)
        liked = {here.worker.special(END_THINK), here.worker.special(THINK)}
        thoughts = 0
        for seed in range(8):
            ids = here.worker.answer(grammar_of(chat), seed, liked=liked)
            message = heard(chat, here.worker.tokenizer, ids)
            assert heard(chat, here.worker.tokenizer, ids, *range(1, len(ids))).text == message.text
            for called, arguments in message.calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            if not message.calls:
                jsonschema.validate(json.loads(message.text), CITY)
            thoughts += here.worker.special(END_THINK) in ids
        assert thoughts > 0


async def test_where_the_thoughts_are_closed_marks_are_no_output(free: Served) -> None:
    chat = await free.prepared(JSON, tools=(), template_variables={"enable_thinking": False})
    assert grammar_of(chat) is JSON
    for mark in MARKS:
        text = json.dumps({"city": mark})
        assert free.takes(chat, text, special=False) and not free.takes(chat, text, special=True)


async def test_every_mark_that_a_grammar_lets_through_is_heard(served: dict[str, Served], free: Served) -> None:
    every = {free.worker.special(mark) for mark in MARKS}
    thoughts = {free.worker.special(mark) for mark in (THINK, END_THINK)}
    assert (await free.prepared(JSON, tools=())).prepared.text.kept_special_ids == every
    assert (await free.prepared(tools=())).prepared.text.kept_special_ids == thoughts
    mistral = served["mistral"]
    own = {mistral.worker.special(mark) for mark in (TOOL_CALLS, CALL_ID, ARGS)}
    assert (await mistral.prepared()).prepared.text.kept_special_ids == own
    assert (await mistral.prepared(JSON, tools=())).prepared.text.kept_special_ids == frozenset()
    for options in ({"tool_choice": REQUIRED}, {"grammar": JSON}, {"tools": (replace(TOOLS[0], strict=True),)}):
        kept = (await mistral.prepared(**options)).prepared.text.kept_special_ids
        assert kept == {mistral.worker.special(mark) for mark in MARKS}

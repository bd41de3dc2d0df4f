"""Thoughts are told from the answer at any cut, with and without an open prompt, with tools behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.plain import PlainParser
from gateway.chat.reasoning import ReasoningParser, Thinking, thinking_of
from gateway.chat.tools.hermes import HermesFormat
from tests.gateway.chat.reading import cut, hear

FREE, OPEN, CLOSED = Thinking.FREE, Thinking.OPEN, Thinking.CLOSED
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def reader(thinking: Thinking, *, separate: bool = True) -> ReasoningParser:
    tools = HermesFormat().new_parser(("f",), parallel=True)
    return ReasoningParser(tools, thinking, separate=separate)


#: (how the prompt ends, what the model writes, reasoning, text, calls, characters before the answer)
GOLDEN = [
    (FREE, "<think>\nHm.\n\nYes.\n</think>\n\nHello.\n", "Hm.\n\nYes.", "Hello.\n", 0, 26),
    (FREE, "\n<think>Hm.</think>Hello", "Hm.", "Hello", 0, 19),
    (FREE, "Hello <think>x</think>", "", "Hello <think>x</think>", 0, 0),
    (FREE, "\n\n Hello", "", "\n\n Hello", 0, 0),
    (FREE, "<think>Hm", "Hm", "", 0, None),
    (FREE, "<thi", "", "<thi", 0, 0),
    (FREE, "<think>a < b </thin", "a < b </thin", "", 0, None),
    (FREE, f"<think>\nf?\n</think>\n\n{CALL}", "f?", "", 1, 19),
    (FREE, f"<think>\n{CALL}\n</think>\n\nNo.", CALL, "No.", 0, len(CALL) + 17),
    (OPEN, "\nHm.\n</think>\n\nHello", "Hm.", "Hello", 0, 13),
    (OPEN, "<think>\nHm.\n</think>\n\nHello", "Hm.", "Hello", 0, 20),
    (OPEN, "Hm.", "Hm.", "", 0, None),
    (OPEN, f"</think>{CALL}", "", "", 1, 8),
    (OPEN, "a</think>b</think>c", "a", "b</think>c", 0, 9),
    (CLOSED, "<think>Hello", "", "<think>Hello", 0, 0),
    (CLOSED, f"Wait. {CALL}", "", "Wait.", 1, 0),
]


@pytest.mark.parametrize(("thinking", "written", "reasoning", "text", "calls", "characters"), GOLDEN)
def test_golden(
    thinking: Thinking, written: str, reasoning: str, text: str, calls: int, characters: int | None
) -> None:
    for pieces in ([written], list(written)):
        parser = reader(thinking)
        heard = hear(parser, pieces)
        assert (heard.reasoning, heard.text, len(heard.calls)) == (reasoning, text, calls)
        assert parser.reasoning_characters == characters


PIECES = ["<think>", "</think>", "<th", "</", ">", " ", "\n", "a", "b c", CALL, "<tool_call>"]


@given(
    st.sampled_from(Thinking),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(0, 100), max_size=8),
    st.booleans(),
)
def test_any_cut(thinking: Thinking, written: str, places: list[int], separate: bool) -> None:
    whole = hear(reader(thinking, separate=separate), [written])
    for pieces in (cut(written, places), list(written)):
        heard = hear(reader(thinking, separate=separate), pieces)
        assert (heard.reasoning, heard.text, heard.calls) == (whole.reasoning, whole.text, whole.calls)
    if not separate and not whole.calls:
        assert (whole.reasoning, whole.text) == ("", written)


@given(
    st.text("ab<>/think \n", max_size=20), st.text("ab<>/ \n", max_size=20), st.lists(st.integers(0, 60), max_size=6)
)
def test_thought_and_answer(thought: str, answer: str, places: list[int]) -> None:
    if "</think>" in thought or "<think>" in thought:
        return
    written = f"<think>{thought}</think>{answer}"
    heard = hear(ReasoningParser(PlainParser(), FREE), cut(written, places))
    assert (heard.reasoning, heard.text) == (thought.strip(), answer.lstrip())


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|assistant|>\n", FREE),
        ("<|assistant|>\n<think>\n", OPEN),
        ("<|assistant|>\n<think>\n\n</think>\n\n", CLOSED),
        ("<think>a</think> Well, <think>b", OPEN),
    ],
)
def test_how_a_prompt_ends(prompt: str, thinking: Thinking) -> None:
    assert thinking_of(prompt) is thinking

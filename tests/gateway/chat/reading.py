"""Runs parsers over texts cut in any way, and writes down what came out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.chat.parts import AnswerParser, Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class Heard:
    """What a client would have at the end."""

    text: str = ""
    reasoning: str = ""
    #: (name, arguments).
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    #: The kinds of parts in order, repeats left out.
    order: list[str] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case TextPart(text):
                    assert text
                    self.text += text
                    self._note("text")
                case ReasoningPart(text):
                    assert text
                    self.reasoning += text
                    self._note("reasoning")
                case ToolCallStart(index, id_, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(id_)
                    self._note(f"call {index}")
                case ToolCallArguments(index, text):
                    assert index == len(self.calls) - 1
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + text)
                    assert self.order[-1] == f"call {index}"

    def _note(self, kind: str) -> None:
        if self.order[-1:] != [kind]:
            self.order.append(kind)


def hear(parser: AnswerParser, pieces: Sequence[str]) -> Heard:
    heard = Heard()
    for piece in pieces:
        heard.add(parser.push(piece))
    heard.add(parser.finish())
    assert parser.called_tools == bool(heard.calls)
    return heard


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, some perhaps empty."""
    ends = sorted(min(place, len(text)) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]

"""Collects the parts of one choice: words and numbered calls, with the blanks around calls left out."""

from collections.abc import Callable

from gateway.chat.parts import Part, TextPart, ToolCallArguments, ToolCallStart


class PartWriter:
    """What parsers write to. Blanks wait until it is known whether a call follows."""

    def __init__(self, new_id: Callable[[], str], *, parallel: bool) -> None:
        """`parallel`: if not, calls after the first are left out."""
        self._new_id = new_id
        self._parallel = parallel
        self._parts: list[Part] = []
        self._blanks: list[str] = []
        self._behind_call = False
        #: Calls begun, those left out included.
        self.num_calls = 0

    def text(self, text: str) -> None:
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        shown = text.rstrip()
        if shown:
            self._parts.append(TextPart("".join(self._blanks) + shown))
            self._blanks.clear()
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def begin_call(self, name: str) -> None:
        self._blanks.clear()
        self._behind_call = True
        self.num_calls += 1
        if self._shows_call:
            self._parts.append(ToolCallStart(self.num_calls - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the call that began last."""
        if text and self._shows_call:
            self._parts.append(ToolCallArguments(self.num_calls - 1, text))

    @property
    def _shows_call(self) -> bool:
        return self._parallel or self.num_calls == 1

    def finish(self) -> None:
        """No call follows any more: the blanks are text."""
        if self._blanks:
            self._parts.append(TextPart("".join(self._blanks)))
            self._blanks.clear()

    def take(self) -> list[Part]:
        """Parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

"""Reads answers of words and calls as they come. Where calls begin, and what follows them, a family of models says."""

from abc import ABC, abstractmethod

from gateway.chat.parts import Part
from gateway.chat.tools.open_call import OpenCall
from gateway.chat.tools.reader import CallReader, held_suffix
from gateway.chat.tools.writer import PartWriter


class CallParser(ABC):
    """`AnswerParser` for one choice. A family looks for calls in `_buffer`, what was not understood yet, and opens
    them."""

    #: What ends a call outside of JSON strings; "" where only the call itself does.
    end_mark = ""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._buffer = ""
        #: Marks, separators and blanks that are text unless a call follows.
        self._lead = ""
        self._call: OpenCall | None = None

    @property
    def called_tools(self) -> bool:
        return self._writer.num_calls > 0

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._read_call(self._call) if self._call is not None else self._advance():
            pass
        return self._writer.take()

    def finish(self) -> list[Part]:
        if self._call is not None:
            self._call.end()
            self._settle(self._call)
        self._writer.text(self._lead + self._rest())
        self._writer.finish()
        return self._writer.take()

    def _read_call(self, call: OpenCall) -> bool:
        self._buffer = self._buffer[call.feed(self._buffer, end_mark=self.end_mark) :]
        if self.end_mark and self._buffer.startswith(self.end_mark):
            call.end()
        if call.over:
            self._settle(call)
        return call.over

    def _settle(self, call: OpenCall) -> None:
        self._call = None
        if call.failed:
            self._failed(call.text)
        else:
            self._called()

    # --- what a family says -----------------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> bool:
        """Outside of calls: take what can be understood from the buffer. Whether there is more to understand."""

    @abstractmethod
    def _called(self) -> None:
        """A call is complete."""

    @abstractmethod
    def _failed(self, text: str) -> None:
        """What looked like a call is none; `text` is all of it, the lead included."""

    def _rest(self) -> str:
        """What of the buffer is text when nothing follows."""
        return self._buffer

    # --- what it says it with ---------------------------------------------------------------------------

    def _find(self, mark: str) -> bool:
        """Show the text before the mark. Whether the mark is there: then it is the lead, and the buffer behind it."""
        before, found, after = self._buffer.partition(mark)
        if found:
            self._writer.text(before)
            self._buffer, self._lead = after, mark
            return True
        shown = len(self._buffer) - held_suffix(self._buffer, mark)
        self._writer.text(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return False

    def _skip_blanks(self) -> str:
        """Blanks go to the lead; what is left."""
        rest = self._buffer.lstrip()
        self._lead += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        return rest

    def _open(self, reader: CallReader) -> None:
        """A call may begin with the buffer."""
        self._call = OpenCall(reader, self._writer, self._lead)
        self._lead = ""

    def _show_lead(self) -> None:
        """No call follows."""
        self._writer.text(self._lead)
        self._lead = ""

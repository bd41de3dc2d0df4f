"""A call that is being read: hands its arguments to the writer as they come, or gives all of it back as text."""

from gateway.chat.tools.reader import CallReader, ReadState
from gateway.chat.tools.writer import PartWriter


class OpenCall:
    """Feed it text until it is over; then it is shown, or has `failed` and its `text` is for the user."""

    def __init__(self, reader: CallReader, writer: PartWriter, lead: str) -> None:
        """`lead`: the marks and blanks in front, which are text if this is no call."""
        self._reader = reader
        self._writer = writer
        self._lead = lead
        self._begun = False

    @property
    def over(self) -> bool:
        return self._reader.state in (ReadState.DONE, ReadState.FAILED)

    @property
    def failed(self) -> bool:
        return self._reader.state is ReadState.FAILED

    @property
    def text(self) -> str:
        return self._lead + self._reader.text

    def feed(self, text: str, *, end_mark: str = "") -> int:
        """Characters taken: all, or those up to where it is over, or up to what is or may become the end mark.

        An end mark counts outside of JSON strings only.
        """
        taken = 0
        while taken < len(text) and not self.over:
            if end_mark and not self._reader.in_string and text[taken] == end_mark[0]:
                rest = text[taken : taken + len(end_mark)]
                if end_mark.startswith(rest):
                    break
            self._reader.feed(text[taken])
            taken += 1
        self._show()
        return taken

    def end(self) -> None:
        """No more of it comes."""
        if not self.over:
            self._reader.end()
        self._show()

    def _show(self) -> None:
        if self._reader.state in (ReadState.HEAD, ReadState.FAILED):
            return
        if not self._begun:
            self._begun = True
            self._writer.begin_call(self._reader.name)
        self._writer.arguments(self._reader.take())

"""Finds stop strings in text that comes in pieces, and holds back what may be the start of one. Knows no tokens."""

from collections.abc import Sequence


class StopChecker:
    """The result depends on the text alone, not on how it was cut into pieces.

    The stop string that is complete first wins; of several complete at the same character, the longest. Work per
    character is constant (amortised) for each stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """
        Args:
            stops: non-empty strings.
            include_stop: let the stop string itself be part of the text.
        """
        assert all(stops), f"empty stop string among {len(stops)}"
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        #: The stop string that was met.
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown now. After a hit (`self.hit` is set) nothing more ever comes."""
        if not self._matchers or self.hit is not None:
            return "" if self.hit is not None else text
        start = len(self._held)
        self._held += text
        for end in range(start + 1, len(self._held) + 1):
            if (stop := self._feed(self._held[end - 1])) is not None:
                return self._stopped(stop, end)
        return self._release(len(self._held) - max(matcher.matched for matcher in self._matchers))

    def flush(self) -> str:
        """What was held back, once it is certain that no text follows."""
        return self._release(len(self._held))

    def _feed(self, character: str) -> str | None:
        """The longest stop string that this character completes."""
        complete = [matcher.stop for matcher in self._matchers if matcher.feed(character)]
        return max(complete, key=len, default=None)

    def _stopped(self, stop: str, end: int) -> str:
        self.hit = stop
        shown = self._release(end if self._include_stop else end - len(stop))
        self._held = ""
        return shown

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown


class _Matcher:
    """Knuth-Morris-Pratt over one stop string; `matched` is how much of it the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _prefix_function(stop)

    def feed(self, character: str) -> bool:
        """True if this character completes the string."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _prefix_function(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = lengths[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        lengths[index] = length
    return lengths

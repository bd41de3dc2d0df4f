"""Reads one call character by character: its arguments go out while they come in, once the name is known.

Until then it may turn out to be no call; its text is then all there. Readers know nothing of marks around calls.
"""

import json
import re
from collections.abc import Collection
from enum import Enum
from typing import Any, Protocol

from common.text.marks import ARGS, CALL_ID
from gateway.json_text import is_text

_OPENS_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*\{\Z')
#: The longest piece of text that the pattern above needs to see; blanks beyond that make it a call read as a whole.
_OPENING_CHARACTERS = 64
#: What an object that is a call may begin with; any other first key ends the suspicion at once.
_FIRST_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_NAMED_HEAD = re.compile(rf"([\w.-]{{1,256}})\s*(?:{re.escape(CALL_ID)}\s*[\w-]+\s*)?(?:{re.escape(ARGS)}\s*)?\{{")
_NAMED_CHARACTER = re.compile(r"[\w.\-\[\]\s{]")
_LONGEST_NAMED_HEAD = 512


class ReadState(Enum):
    #: The name is not known yet.
    HEAD = 0
    ARGUMENTS = 1
    #: The arguments are complete, the call is not.
    TAIL = 2
    DONE = 3
    #: It is no call.
    FAILED = 4


class CallReader(Protocol):
    """Feed characters until `state` is DONE or FAILED."""

    state: ReadState
    #: The function's name, from ARGUMENTS on.
    name: str

    def feed(self, character: str) -> None: ...

    def end(self) -> None:
        """No more of it comes: what has begun is DONE, what has not is FAILED."""
        ...

    def take(self) -> str:
        """Argument text since the last time."""
        ...

    @property
    def text(self) -> str:
        """All that was fed."""
        ...

    @property
    def in_string(self) -> bool:
        """Inside a JSON string, where marks are ordinary text."""
        ...


class JsonNesting:
    """Depth of brackets in JSON text, those in strings apart."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def feed(self, character: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class JsonCall:
    """`{"name": ..., "arguments": {...}}`, or with `parameters`; members in any order, others are left out.

    Arguments come out as they are written. If the name comes behind them, or if they are not an object (a string that
    holds JSON counts, so does nothing at all), they come out when the object is complete.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: only calls of these functions are calls; None: all are."""
        self._names = names
        self._nesting = JsonNesting()
        self._characters: list[str] = []
        self._fragments: list[str] = []
        self._opened = False
        self._key_start: int | None = None
        self._has_key = False
        #: Where the arguments lie, if they came before the name.
        self._span_start: int | None = None
        self._span_end: int | None = None
        self.state = ReadState.HEAD
        self.name = ""

    @property
    def text(self) -> str:
        return "".join(self._characters)

    @property
    def in_string(self) -> bool:
        return self._nesting.in_string

    def feed(self, character: str) -> None:
        self._characters.append(character)
        self._nesting.feed(character)
        if self.state is ReadState.ARGUMENTS:
            self._fragments.append(character)
            if self._nesting.depth == 1 and not self.in_string:
                self.state = ReadState.TAIL
        elif self.state is ReadState.TAIL:
            if self._nesting.depth == 0:
                self.state = ReadState.DONE
        else:
            self._feed_head(character)

    def end(self) -> None:
        self.state = ReadState.FAILED if self.state is ReadState.HEAD else ReadState.DONE

    def take(self) -> str:
        text = "".join(self._fragments)
        self._fragments.clear()
        return text

    def _feed_head(self, character: str) -> None:
        depth = self._nesting.depth
        if not self._opened:
            self._opened = character == "{"
            if not self._opened and not character.isspace():
                self.state = ReadState.FAILED
        elif not self._has_key:
            self._check_first_key(character)
        elif depth == 0:
            self._read_whole()
        elif depth == 2 and character == "{" and not self.in_string:
            self._check_opening()
        elif depth == 1 and character == "}" and self._span_start is not None and self._span_end is None:
            self._span_end = len(self._characters)

    def _check_first_key(self, character: str) -> None:
        if self._key_start is None:
            if character == '"':
                self._key_start = len(self._characters) - 1
            elif not character.isspace():
                self.state = ReadState.FAILED
        elif not self.in_string:
            self._has_key = True
            if _loads("".join(self._characters[self._key_start :])) not in _FIRST_KEYS:
                self.state = ReadState.FAILED

    def _check_opening(self) -> None:
        """An object opens; if it holds the arguments and the name is known, the call has begun."""
        if not _OPENS_ARGUMENTS.search("".join(self._characters[-_OPENING_CHARACTERS:])):
            return
        head = _loads(self.text + "}}")
        if not isinstance(head, dict) or self._span_start is not None:
            self.state = ReadState.FAILED
        elif "name" not in head:
            self._span_start = len(self._characters) - 1
        elif self._accepts(head["name"]):
            self.name = head["name"]
            self._fragments.append("{")
            self.state = ReadState.ARGUMENTS
        else:
            self.state = ReadState.FAILED

    def _read_whole(self) -> None:
        call = _loads(self.text)
        arguments = self._whole_arguments(call) if isinstance(call, dict) else None
        if arguments is None or not self._accepts(call.get("name")):
            self.state = ReadState.FAILED
            return
        self.name = call["name"]
        self._fragments.append(arguments)
        self.state = ReadState.DONE

    def _whole_arguments(self, call: dict[str, Any]) -> str | None:
        value = call.get("arguments", call.get("parameters"))
        if isinstance(value, dict):
            return "".join(self._characters[self._span_start : self._span_end])
        if value is None:
            return "{}"
        return value if isinstance(value, str) and is_text(value) else None

    def _accepts(self, name: object) -> bool:
        return isinstance(name, str) and name != "" and is_text(name) and (self._names is None or name in self._names)


class NamedCall:
    """`name{...}`, with `[ARGS]` or `[CALL_ID]...` between, as newer Mistral models write it."""

    def __init__(self) -> None:
        self._nesting = JsonNesting()
        self._characters: list[str] = []
        self._fragments: list[str] = []
        self.state = ReadState.HEAD
        self.name = ""

    @property
    def text(self) -> str:
        return "".join(self._characters)

    @property
    def in_string(self) -> bool:
        return self._nesting.in_string

    def feed(self, character: str) -> None:
        self._characters.append(character)
        if self.state is ReadState.HEAD:
            self._feed_head(character)
            return
        self._nesting.feed(character)
        self._fragments.append(character)
        if self._nesting.depth == 0:
            self.state = ReadState.DONE

    def end(self) -> None:
        self.state = ReadState.FAILED if self.state is ReadState.HEAD else ReadState.DONE

    def take(self) -> str:
        text = "".join(self._fragments)
        self._fragments.clear()
        return text

    def _feed_head(self, character: str) -> None:
        if not _NAMED_CHARACTER.match(character) or len(self._characters) > _LONGEST_NAMED_HEAD:
            self.state = ReadState.FAILED
        elif character == "{":
            head = _NAMED_HEAD.fullmatch(self.text)
            if head is None:
                self.state = ReadState.FAILED
                return
            self.name = head[1]
            self._nesting.feed(character)
            self._fragments.append(character)
            self.state = ReadState.ARGUMENTS


def _loads(text: str) -> Any:
    """The value, with raw line breaks in strings allowed; None if it is no JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def held_suffix(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the start of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0

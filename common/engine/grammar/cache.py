"""Grammars, and refusals of some, kept by digest and bounded in bytes; the least recently used one goes first."""

import hashlib
from collections import OrderedDict

from common.engine.grammar.grammar import Grammar

#: A grammar, or in words why there is none.
Entry = Grammar | str

#: What an entry takes beside its content: key, objects, links.
_OVERHEAD = 512


class GrammarCache:
    """Not safe for use by several threads at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """At most what it was made for."""
        return self._num_bytes

    def get(self, key: bytes) -> Entry | None:
        """What is kept under `key`, now the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        """Keep an entry, in place of others if need be; one that is larger than all the cache is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._num_bytes -= _size(old)
        if _size(entry) > self._max_bytes:
            return
        self._entries[key] = entry
        self._num_bytes += _size(entry)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _size(dropped)


def digest(*parts: bytes) -> bytes:
    """A key for a text in several parts, however long."""
    lengths = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return hashlib.sha256(lengths + b"".join(parts)).digest()


def _size(entry: Entry) -> int:
    content = 4 * len(entry) if isinstance(entry, str) else entry.num_bytes
    return content + _OVERHEAD

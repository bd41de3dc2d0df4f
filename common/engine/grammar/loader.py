"""From a grammar that another worker has compiled to a grammar, on a thread of its own."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from common.engine.grammar.cache import GrammarCache
from common.engine.grammar.grammar import Grammar
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind

T = TypeVar("T")


class GrammarLoader:
    """Loads one at a time and keeps what is used. `load` and `find` may be called from any thread.

    They are served in order: what is loaded is found by all who ask later, as long as it is kept.
    """

    def __init__(self, vocabulary: Vocabulary | None, *, cache_bytes: int = 256 << 20) -> None:
        """`vocabulary`: None if the model has none that grammars could be about; each is refused then."""
        self._vocabulary = vocabulary
        #: Used on the loading thread alone.
        self._cache = GrammarCache(cache_bytes)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-loader")

    def load(self, kind: GrammarKind, serialized: bytes) -> "Future[Grammar]":
        """The grammar of this kind that these bytes are.

        The future fails with InvalidRequest, naming `compiled_grammar`, if they are none of this model's; with
        Overloaded after `close`.
        """
        return self._submit(lambda: self._load(kind, serialized))

    def find(self, kind: GrammarKind, digest: bytes) -> "Future[Grammar | None]":
        """The grammar of this kind with that `Grammar.digest`; None if it is not kept.

        The future fails with Overloaded after `close`.
        """
        return self._submit(lambda: self._find(kind, digest))

    def close(self) -> None:
        """Finish what was asked for, which takes milliseconds, and end the thread."""
        self._executor.shutdown()

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        try:
            return self._executor.submit(work)
        except RuntimeError:
            # The one thing that an executor refuses for.
            refused: Future[T] = Future()
            refused.set_exception(Overloaded("this worker is stopping"))
            return refused

    def _find(self, kind: GrammarKind, digest: bytes) -> Grammar | None:
        entry = self._cache.get(_key(kind, digest))
        return entry if isinstance(entry, Grammar) else None

    def _load(self, kind: GrammarKind, serialized: bytes) -> Grammar:
        if self._vocabulary is None:
            raise InvalidRequest("this worker's model takes no grammars", field="compiled_grammar")
        digest = hashlib.sha256(serialized).digest()
        entry = self._find(kind, digest)
        if entry is None:
            try:
                entry = self._vocabulary.load_grammar(kind, serialized)
            except ValueError as error:
                raise InvalidRequest(str(error), field="compiled_grammar") from error
            self._cache.put(_key(kind, digest), entry)
        return entry


def _key(kind: GrammarKind, digest: bytes) -> bytes:
    return digest + kind.value.encode()

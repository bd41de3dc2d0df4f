"""From a grammar that another worker has compiled to a grammar, on a thread of its own."""

from concurrent.futures import Future, ThreadPoolExecutor

from common.engine.grammar.cache import GrammarCache, digest
from common.engine.grammar.grammar import Grammar
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind


class GrammarLoader:
    """Loads one at a time and keeps what is used. `load` may be called from any thread."""

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
        try:
            return self._executor.submit(self._load, kind, serialized)
        except RuntimeError:
            # The one thing that an executor refuses for.
            refused: Future[Grammar] = Future()
            refused.set_exception(Overloaded("this worker is stopping"))
            return refused

    def close(self) -> None:
        """Finish what was asked for, which takes milliseconds, and end the thread."""
        self._executor.shutdown()

    def _load(self, kind: GrammarKind, serialized: bytes) -> Grammar:
        if self._vocabulary is None:
            raise InvalidRequest("this worker's model takes no grammars", field="compiled_grammar")
        key = digest(kind.value.encode(), serialized)
        entry = self._cache.get(key)
        if not isinstance(entry, Grammar):
            try:
                entry = self._vocabulary.load_grammar(kind, serialized)
            except ValueError as error:
                raise InvalidRequest(str(error), field="compiled_grammar") from error
            self._cache.put(key, entry)
        return entry

"""Which grammars a prefill worker was sent on its present stream, so that each travels there once."""

from collections import OrderedDict

from common.engine.grammar import Grammar
from common.sampling import GrammarKind

#: Some hundred bytes each. Who has forgotten one sends it again.
MAX_REMEMBERED = 4096


class SentGrammars:
    """Whether the worker still has them is not known here: it asks for what it has not."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        #: The most recently used last.
        self._keys: OrderedDict[tuple[GrammarKind, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, kind: GrammarKind, grammar: Grammar) -> bool:
        """A request with this grammar is being sent. Whether it was sent before; it counts as sent from now on."""
        key = (kind, grammar.digest)
        known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_remembered:
            self._keys.popitem(last=False)
        return known

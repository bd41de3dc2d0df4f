"""Requests whose grammar is being loaded, beside the engine, which takes them afterwards.

A grammar comes along with a request, or only its digest: then it is looked for here, and asked for if it is not kept.
Until then the engine does not know them, so that cancel and loss of their peer are seen to here. Lives on the event
loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from common.engine.grammar import Grammar
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind
from prefill_svc.request import Cancel, Ended, GrammarWanted, PrefillOutput, PrefillRequest

Key = tuple[str, int]
#: A grammar that is being loaded, or found.
_Coming = asyncio.Future[Grammar] | asyncio.Future[Grammar | None]


@dataclass(slots=True, eq=False)
class _Waiting:
    request: PrefillRequest
    #: None while it is asked for.
    grammar: _Coming | None = None


class GrammarGate:
    """Holds requests until their grammar is there.

    Args:
        load: see `GrammarLoader.load`.
        find: see `GrammarLoader.find`.
        admit: takes the request, now with its grammar, to the engine.
        deliver: takes answers to the request's peer.
    """

    def __init__(
        self,
        *,
        load: Callable[[GrammarKind, bytes], "Future[Grammar]"],
        find: Callable[[GrammarKind, bytes], "Future[Grammar | None]"],
        admit: Callable[[PrefillRequest], None],
        deliver: Callable[[Sequence[PrefillOutput]], None],
    ) -> None:
        self._load = load
        self._find = find
        self._admit = admit
        self._deliver = deliver
        self._waiting: dict[Key, _Waiting] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: PrefillRequest, compiled_grammar: bytes) -> None:
        """Hand it to the engine once its grammar is loaded; never before this returns."""
        self._begin(request, lambda kind: asyncio.wrap_future(self._load(kind, compiled_grammar)))

    def submit_known(self, request: PrefillRequest, digest: bytes) -> None:
        """The same for one whose grammar came before. Should it be gone, `GrammarWanted` is delivered and the request
        waits for `supply`."""
        self._begin(request, lambda kind: asyncio.wrap_future(self._find(kind, digest)))

    def supply(self, peer: str, transfer_id: int, compiled_grammar: bytes) -> None:
        """The grammar that was asked for; ignored if the request has ended meanwhile."""
        waiting = self._waiting.get((peer, transfer_id))
        if waiting is not None and waiting.grammar is None:
            self._wait(waiting, lambda kind: asyncio.wrap_future(self._load(kind, compiled_grammar)))

    def cancel(self, cancel: Cancel) -> bool:
        """End a request that waits. False: there is no such request here."""
        if not self._drop((cancel.peer, cancel.transfer_id)):
            return False
        self._deliver([Ended(cancel.peer, cancel.transfer_id, "cancelled")])
        return True

    def drop_peer(self, peer: str) -> None:
        """The peer is gone: forget its requests without an answer."""
        for key in [key for key in self._waiting if key[0] == peer]:
            self._drop(key)

    def _begin(self, request: PrefillRequest, get: Callable[[GrammarKind], _Coming]) -> None:
        key = (request.peer, request.transfer_id)
        if key in self._waiting:
            self._deliver([Ended(*key, "rejected", "transfer_id: it is running already")])
            return
        if request.params.grammar is None:
            self._deliver([Ended(*key, "rejected", "compiled_grammar: there is no grammar that it could be")])
            return
        waiting = self._waiting[key] = _Waiting(request)
        self._wait(waiting, get)

    def _wait(self, waiting: _Waiting, get: Callable[[GrammarKind], _Coming]) -> None:
        spec = waiting.request.params.grammar
        assert spec is not None, "a request without a grammar has nothing to wait for"
        grammar = waiting.grammar = get(spec.kind)
        grammar.add_done_callback(lambda _: self._came(waiting, grammar))

    def _drop(self, key: Key) -> bool:
        waiting = self._waiting.pop(key, None)
        if waiting is not None and waiting.grammar is not None:
            waiting.grammar.cancel()
        return waiting is not None

    def _came(self, waiting: _Waiting, grammar: _Coming) -> None:
        error = None if grammar.cancelled() else grammar.exception()
        key = (waiting.request.peer, waiting.request.transfer_id)
        if self._waiting.get(key) is not waiting:
            return
        if error is None and grammar.result() is None:
            waiting.grammar = None
            self._deliver([GrammarWanted(*key)])
            return
        del self._waiting[key]
        match error:
            case None:
                self._admit(replace(waiting.request, grammar=grammar.result()))
            case InvalidRequest():
                self._deliver([Ended(*key, "rejected", f"{error.field}: {error.message}")])
            case Overloaded():
                self._deliver([Ended(*key, "shortage", error.message)])
            case _:
                raise error

"""Requests whose grammar is being loaded, beside the engine, which takes them afterwards.

Until then the engine does not know them, so that cancel and loss of their peer are seen to here. Lives on the event
loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from common.engine.grammar import Grammar
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind
from prefill_svc.request import Cancel, Ended, PrefillOutput, PrefillRequest

Key = tuple[str, int]


class GrammarGate:
    """Holds requests until their grammar is there.

    Args:
        load: see `GrammarLoader.load`.
        admit: takes the request, now with its grammar, to the engine.
        deliver: takes answers to the request's peer.
    """

    def __init__(
        self,
        *,
        load: Callable[[GrammarKind, bytes], "Future[Grammar]"],
        admit: Callable[[PrefillRequest], None],
        deliver: Callable[[Sequence[PrefillOutput]], None],
    ) -> None:
        self._load = load
        self._admit = admit
        self._deliver = deliver
        self._waiting: dict[Key, asyncio.Future[Grammar]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: PrefillRequest, compiled_grammar: bytes) -> None:
        """Hand it to the engine once its grammar is loaded; never before this returns."""
        key = (request.peer, request.transfer_id)
        if key in self._waiting:
            self._deliver([Ended(*key, "rejected", "transfer_id: it is running already")])
            return
        spec = request.params.grammar
        if spec is None:
            self._deliver([Ended(*key, "rejected", "compiled_grammar: there is no grammar that it could be")])
            return
        grammar = self._waiting[key] = asyncio.wrap_future(self._load(spec.kind, compiled_grammar))
        grammar.add_done_callback(lambda _: self._loaded(request, grammar))

    def cancel(self, cancel: Cancel) -> bool:
        """End a request that waits. False: there is no such request here."""
        grammar = self._waiting.pop((cancel.peer, cancel.transfer_id), None)
        if grammar is None:
            return False
        grammar.cancel()
        self._deliver([Ended(cancel.peer, cancel.transfer_id, "cancelled")])
        return True

    def drop_peer(self, peer: str) -> None:
        """The peer is gone: forget its requests without an answer."""
        for key in [key for key in self._waiting if key[0] == peer]:
            self._waiting.pop(key).cancel()

    def _loaded(self, request: PrefillRequest, grammar: "asyncio.Future[Grammar]") -> None:
        error = None if grammar.cancelled() else grammar.exception()
        key = (request.peer, request.transfer_id)
        if self._waiting.get(key) is not grammar:
            return
        del self._waiting[key]
        match error:
            case None:
                self._admit(replace(request, grammar=grammar.result()))
            case InvalidRequest():
                self._deliver([Ended(*key, "rejected", f"{error.field}: {error.message}")])
            case Overloaded():
                self._deliver([Ended(*key, "shortage", error.message)])
            case _:
                raise error

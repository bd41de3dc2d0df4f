"""Grammars that come when a test lets them, and masks that come when they like."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from common.engine.grammar import LATE, Grammar, GrammarState
from common.engine.grammar.masks import Masks
from common.errors import TandemError
from tests.factories.engines import compile_regex


class Grammars:
    """Stands in for a compiler (or loader): each call gets a future that the test settles, by order of the calls."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.futures: list[Future[Grammar]] = []

    def __call__(self, *what: object) -> "Future[Grammar]":
        self.asked.append(what if len(what) > 1 else what[0])
        self.futures.append(Future())
        return self.futures[-1]

    def finish(self, index: int = 0, regex: str = "[a-v]*") -> Grammar:
        """What came `index`-th is this grammar, over the letters of the engines' tiny vocabulary."""
        grammar = compile_regex(regex)
        assert self.futures[index].set_running_or_notify_cancel(), "nobody waits for it"
        self.futures[index].set_result(grammar)
        return grammar

    def miss(self, index: int = 0) -> None:
        """There is none for what came `index`-th."""
        assert self.futures[index].set_running_or_notify_cancel(), "nobody waits for it"
        self.futures[index].set_result(None)  # type: ignore[arg-type]  # of a finder's

    def fail(self, error: TandemError, index: int = 0) -> None:
        assert self.futures[index].set_running_or_notify_cancel(), "nobody waits for it"
        self.futures[index].set_exception(error)


class UnreliableMasks:
    """Stands in for a `MaskFiller`: some masks are late, and states must then be left alone."""

    def __init__(self, seed: int = 0, share_late: float = 0.4) -> None:
        self._random = random.Random(seed)
        self.share_late = share_late
        self._late: dict[GrammarState, int] = {}
        self.num_late = 0

    def start(self, states: Sequence[GrammarState | None]) -> "UnreliableMasks":
        self._states = states
        return self

    def wait(self) -> Masks:
        return [None if state is None else self._mask(state) for state in self._states]

    def check(self) -> None:
        """At any moment: a thread may be at work on those that are late."""
        for state, pushed in self._late.items():
            assert len(state._pushed) == pushed, "a token was drawn without a mask"

    def _mask(self, state: GrammarState) -> Any:
        self.check()
        pushed = len(state._pushed)
        self._late.pop(state, None)
        if self._random.random() >= self.share_late:
            return state.next_mask()
        self.num_late += 1
        self._late[state] = pushed
        return LATE

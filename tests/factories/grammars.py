"""Grammars that come when a test lets them."""

from concurrent.futures import Future

from common.engine.grammar import Grammar
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

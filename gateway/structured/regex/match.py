"""Whether a text matches a regular expression's tree, in time proportional to text times tree: nothing backtracks."""

from gateway.structured.regex.tree import Alternation, Anchor, Chars, Concat, Node, Ranges, Repeat


class Automaton:
    """A nondeterministic automaton of a tree without anchors."""

    def __init__(self, tree: Node) -> None:
        self._free: list[list[int]] = []
        self._steps: list[tuple[Ranges, int] | None] = []
        self._start = self._state()
        self._end = self._add(tree, self._start)

    def matches(self, text: str) -> bool:
        """Whether the whole of `text` does."""
        states = self._closed({self._start})
        for character in text:
            code = ord(character)
            reached = set()
            for state in states:
                step = self._steps[state]
                if step is not None and any(low <= code <= high for low, high in step[0]):
                    reached.add(step[1])
            if not reached:
                return False
            states = self._closed(reached)
        return self._end in states

    def _state(self) -> int:
        self._free.append([])
        self._steps.append(None)
        return len(self._free) - 1

    def _add(self, tree: Node, start: int) -> int:
        """States for the tree behind `start`; returns where it ends."""
        match tree:
            case Chars():
                end = self._state()
                begin = self._after(start)
                self._steps[begin] = (tree.ranges, end)
                return end
            case Concat():
                for item in tree.items:
                    start = self._add(item, start)
                return start
            case Alternation():
                end = self._state()
                for option in tree.options:
                    self._free[self._add(option, self._after(start))].append(end)
                return end
            case Repeat():
                return self._add_repeat(tree, start)
            case Anchor():
                raise AssertionError("anchors are resolved before an expression is matched")

    def _add_repeat(self, tree: Repeat, start: int) -> int:
        for _ in range(tree.low):
            start = self._add(tree.item, start)
        end = self._state()
        self._free[start].append(end)
        if tree.high is None:
            again = self._after(start)
            self._free[self._add(tree.item, again)].extend((again, end))
            return end
        for _ in range(tree.high - tree.low):
            start = self._add(tree.item, self._after(start))
            self._free[start].append(end)
        return end

    def _after(self, state: int) -> int:
        """A fresh state that `state` reaches without a character."""
        fresh = self._state()
        self._free[state].append(fresh)
        return fresh

    def _closed(self, states: set[int]) -> set[int]:
        stack = list(states)
        while stack:
            for state in self._free[stack.pop()]:
                if state not in states:
                    states.add(state)
                    stack.append(state)
        return states

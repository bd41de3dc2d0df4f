"""Tables over one pool: what they share, publish, copy and give back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTable
from common.hashing import block_hashes

SIZE = 3
BLOCKS = 10


class Tables(RuleBasedStateMachine):
    """Sequences with few different tokens, so that prefixes are equal often; `kv` is what a runner would write."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables: list[tuple[BlockTable, str, list[int]]] = []
        #: Salt and tokens up to and including its own, by slot.
        self.kv: dict[int, tuple[str, tuple[int, ...]]] = {}

    def write(self, table: BlockTable, salt: str, tokens: list[int], start: int, end: int) -> None:
        for position, slot in enumerate(table.slots(start, end), start):
            self.kv[slot] = (salt, tuple(tokens[: position + 1]))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "a"]))
    @precondition(lambda self: len(self.tables) < 6)
    def open(self, tokens: list[int], salt: str) -> None:
        self.adopt(tokens, salt)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=12), num=st.integers(2, 3))
    @precondition(lambda self: len(self.tables) < 4)
    def arrive_together(self, tokens: list[int], num: int) -> None:
        """The same prompt several times at once: none finds what the others compute."""
        opened = [self.adopt(tokens, "") for _ in range(num)]
        for table, salt, known in opened:
            self.extend(table, salt, known, tokens[len(known) :])

    def adopt(self, tokens: list[int], salt: str) -> tuple[BlockTable, str, list[int]]:
        table = BlockTable(self.pool, salt)
        found = table.adopt_prefix(tokens, block_hashes(tokens, SIZE, salt))
        assert found == table.num_cached == table.num_computed < len(tokens)
        assert found % SIZE == 0 and len(table.blocks) == found // SIZE
        self.tables.append((table, salt, tokens[:found]))
        return self.tables[-1]

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    @precondition(lambda self: self.tables)
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        self.extend(*data.draw(st.sampled_from(self.tables)), more)

    def extend(self, table: BlockTable, salt: str, tokens: list[int], more: list[int]) -> None:
        blocks, available = list(table.blocks), self.pool.num_available
        missing = table.missing(len(tokens) + len(more))
        if not table.reserve(len(tokens) + len(more)):
            assert missing > available and table.blocks == blocks
            return
        assert table.blocks[: len(blocks)] == blocks and len(table.blocks) == len(blocks) + missing
        tokens += more
        self.write(table, salt, tokens, len(tokens) - len(more), len(tokens))
        table.commit(more)

    @rule(data=st.data(), spare=st.integers(1, 5))
    @precondition(lambda self: self.tables)
    def reserve_ahead(self, data: st.DataObject, spare: int) -> None:
        table, _, tokens = data.draw(st.sampled_from(self.tables))
        assert not table.reserve(len(tokens) + spare) or table.missing(len(tokens) + spare) == 0

    @rule()
    def evict(self) -> None:
        """Everything that nobody owns gives way to a sequence that comes and goes."""
        blocks = self.pool.allocate(self.pool.num_available)
        assert blocks is not None
        self.pool.release(blocks)

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.tables) < 6)
    def fork(self, data: st.DataObject) -> None:
        table, salt, tokens = data.draw(st.sampled_from(self.tables))
        available = self.pool.num_available

        def copy(source: int, target: int) -> None:
            for offset in range(SIZE):
                if (entry := self.kv.get(source * SIZE + offset)) is not None:
                    self.kv[target * SIZE + offset] = entry

        twin = table.fork(tokens, copy)
        if twin is None:
            assert available == 0 and len(tokens) % SIZE
            return
        assert (twin.num_computed, twin.num_cached) == (table.num_computed, table.num_cached)
        full = len(tokens) // SIZE
        assert twin.blocks[:full] == table.blocks[:full]
        assert not set(twin.blocks[full:]) & set(table.blocks)
        self.tables.append((twin, salt, list(tokens)))

    @rule(data=st.data(), twice=st.booleans())
    @precondition(lambda self: self.tables)
    def release(self, data: st.DataObject, twice: bool) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _, _ = self.tables.pop(index)
        for _ in range(1 + twice):
            table.release()
        assert (table.blocks, table.num_computed, table.num_cached) == ([], 0, 0)

    @invariant()
    def every_table_finds_its_own_kv(self) -> None:
        self.pool.check()
        for table, salt, tokens in self.tables:
            assert table.num_computed == len(tokens)
            for position, slot in enumerate(table.slots(0, len(tokens))):
                assert self.kv[slot] == (salt, tuple(tokens[: position + 1])), f"position {position} of {tokens}"

    @invariant()
    def what_is_published_is_full_and_final(self) -> None:
        """Whoever matches finds the KV of exactly these tokens, all that any table has of it."""
        for _, salt, tokens in self.tables:
            hashes = block_hashes(tokens, SIZE, salt)
            matched = self.pool.match(hashes)
            assert len(matched) == len(hashes), f"of {len(hashes)} blocks {len(matched)} are found"
            for index, block in enumerate(matched):
                end = (index + 1) * SIZE
                assert self.kv[block * SIZE + SIZE - 1] == (salt, tuple(tokens[:end]))

    def teardown(self) -> None:
        for table, _, _ in self.tables:
            table.release()
        self.pool.check()
        assert self.pool.num_owned == 0


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTables = Tables.TestCase


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(6))
    first = BlockTable(pool, "")
    assert first.reserve(6)
    first.commit(tokens)
    second = BlockTable(pool, "")
    assert second.adopt_prefix(tokens, block_hashes(tokens, SIZE)) == 3
    third = BlockTable(pool, "")
    assert third.adopt_prefix([*tokens, 9], block_hashes(tokens, SIZE)) == 6


def test_another_salt_finds_nothing() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(7))
    first = BlockTable(pool, "a")
    assert first.reserve(7)
    first.commit(tokens)
    assert BlockTable(pool, "b").adopt_prefix(tokens, block_hashes(tokens, SIZE, "b")) == 0


def test_what_two_computed_at_once_is_found_as_long_as_one_of_them_has_it() -> None:
    pool = BlockPool(6, SIZE)
    tokens = list(range(6))
    tables = [BlockTable(pool, ""), BlockTable(pool, "")]
    for table in tables:
        assert table.reserve(6)
        table.commit(tokens)
    tables[0].release()
    # All but what the second one owns is taken for something else.
    assert len(pool.allocate(pool.num_available) or ()) == 4
    assert BlockTable(pool, "").adopt_prefix([*tokens, 9], block_hashes(tokens, SIZE)) == 6

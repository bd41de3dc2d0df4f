"""No port is given away twice."""

from collections.abc import Iterator

import pytest

from tests.e2e import ports
from tests.e2e.ports import Ports


@pytest.fixture
def two() -> Iterator[list[Ports]]:
    both = [Ports(), Ports()]
    yield both
    for one in both:
        one.give_back()


def test_a_port_is_claimed_until_it_is_given_back(two: list[Ports], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two
    drawn = iter([15_001, 15_001, 15_002, 15_001])
    monkeypatch.setattr(ports, "free_port", lambda: next(drawn))
    assert first.take() == 15_001
    assert second.take() == 15_002
    first.give_back()
    assert second.take() == 15_001

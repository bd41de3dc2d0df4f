"""One compiler for all tests of structured output."""

import pytest

from tests.gateway.structured.walking import Bench


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()

"""Sizes that cannot work are refused by option, before anything is registered."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.errors import ConfigError
from kv_store.setup import create_transfer


@pytest.mark.parametrize(
    ("staging_memory", "slot_bytes", "option"),
    [
        (1 << 20, 1001, "--slot-bytes"),
        (1 << 20, 0, "--slot-bytes"),
        (1 << 20, 64, "--slot-bytes"),
        (1 << 20, 1 << 20, "--staging-memory"),
    ],
)
def test_sizes_that_cannot_work_name_their_option(staging_memory: int, slot_bytes: int, option: str) -> None:
    options = SimpleNamespace(staging_memory=staging_memory, slot_bytes=slot_bytes, checksum=False)
    with pytest.raises(ConfigError) as caught:
        create_transfer(
            cast(Any, None),
            "incarnation",
            cast(Any, options),
            torch.zeros(2, 2, 4, 4, 2, 8),
            on_event=lambda event: None,
            on_failure=lambda error: None,
        )
    assert caught.value.field == option

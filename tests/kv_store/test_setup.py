"""A worker's end of KV transfers: sizes that cannot work are refused by option, before anything is registered; the
others make slots, start, and stop."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.errors import ConfigError
from common.pb.tandem.v1.worker_pb2 import WorkerStatus
from common.service.identity import WorkerIdentity
from kv_store.setup import KVEndpoint, create_transfer


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


async def test_an_endpoint_has_the_slots_that_fit_and_ends_its_thread() -> None:
    errors: list[BaseException] = []
    context = SimpleNamespace(identity=WorkerIdentity.new("decode", "d"), fail=errors.append)
    options = SimpleNamespace(transport="grpc", staging_memory=5 * 512 + 100, slot_bytes=512, checksum=True)
    endpoint = KVEndpoint(
        cast(Any, context), cast(Any, options), torch.zeros(2, 2, 4, 4, 2, 8), on_event=lambda event: None
    )
    endpoint.start("127.0.0.1:1")
    status = WorkerStatus()
    endpoint.fill_status(status)
    assert (status.staging.total, status.staging.free, status.staging.granted) == (5, 5, 0)
    await endpoint.stop()
    assert not errors

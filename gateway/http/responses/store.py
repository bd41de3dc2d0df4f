"""What is kept of answers, for their owners to read and to go on from. Text is personal: it is kept for a time only."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.http.formats import Json
from gateway.http.json_body import json_bytes, json_paced
from gateway.off_loop import off_loop

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
#: Bytes of one stored response with its input; a longer one is not stored.
MAX_BYTES = 4 * 1024 * 1024
#: What a stored text begins with. Another version's text, with something else there, is as good as none.
_FORM = b"tandem.response.1"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended, as JSON: each part is read only where it is needed, for they may be long."""

    status: str
    #: As its client got it.
    response: bytes
    #: Items that it was made from, in order, those of earlier responses included.
    input: bytes
    #: Its own items, as the next response goes on from them: what only the client reads is left out.
    output: bytes

    @classmethod
    async def of(cls, response: Json, input_: Sequence[Json]) -> "StoredResponse | None":
        """None for one that is longer than what is ever stored."""
        pieces = await json_paced(response)
        if sum(map(len, pieces)) > MAX_BYTES:
            return None
        output = [_without_logprobs(item) for item in response["output"]]
        return cls(response["status"], b"".join(pieces), await json_bytes(list(input_)), await json_bytes(output))

    async def items(self) -> list[Json]:
        """Its input."""
        return await _parsed(self.input)

    async def conversation(self) -> list[Json]:
        """What the next response goes on from: input and output."""
        return [*await _parsed(self.input), *await _parsed(self.output)]

    def encode(self) -> bytes:
        """One line for each part: JSON has no line breaks."""
        return b"\n".join((_FORM, self.status.encode(), self.response, self.input, self.output))

    @classmethod
    def decode(cls, stored: bytes) -> "StoredResponse | None":
        """None if it is not of this version."""
        form, *parts = stored.split(b"\n")
        if form != _FORM:
            return None
        status, response, input_, output = parts
        return cls(status.decode(), response, input_, output)


async def _parsed(items: bytes) -> list[Json]:
    parsed: list[Json] = await off_loop(lambda: json.loads(items), len(items))
    return parsed


class ResponseStore(Protocol):
    """Responses by owner and id: what one tenant stored is not there for another."""

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        ...

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Whether it is kept. Never raises: an answer must not fail because it could not be stored."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None if there is none (any more). Raises StoreUnavailable if that cannot be told."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one. Raises StoreUnavailable if it may still be there."""
        ...


async def find(store: ResponseStore, tenant: str, response_id: str) -> StoredResponse | None:
    """As `store.get`; what cannot be an id of ours is not looked for."""
    return await store.get(tenant, response_id) if _RESPONSE_ID.fullmatch(response_id) else None


class NoStore:
    """Keeps nothing."""

    enabled = False

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        return False

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        return None

    async def delete(self, tenant: str, response_id: str) -> bool:
        return False


def _without_logprobs(item: Json) -> Json:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}

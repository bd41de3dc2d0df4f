"""What is kept of answers, for their owners to read and to go on from. Text is personal: it is kept for a time only."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Protocol

from gateway.http.formats import Json
from gateway.http.json_body import json_body
from gateway.off_loop import off_loop

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
#: Characters of one stored response with its input; a longer one is not stored.
MAX_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended."""

    #: As its client got it.
    response: Json
    #: Items that it was made from, in order, those of earlier responses included.
    input: list[Json]

    @property
    def conversation(self) -> list[Json]:
        """What the next response goes on from: input and output; what only the client reads is left out."""
        return [*self.input, *(_without_logprobs(item) for item in self.response["output"])]

    async def encode(self) -> str:
        """As text; a thread does it: with log probabilities it is long."""
        value = {"response": self.response, "input": self.input}
        return (await asyncio.to_thread(json_body, value)).decode()

    @classmethod
    async def decode(cls, text: str) -> "StoredResponse":
        return cls(**await off_loop(lambda: json.loads(text), len(text)))


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

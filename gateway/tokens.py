"""Texts to token ids and back, for callers who want to see them. Knows no API; long ones leave the event loop free."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.text.tokenizer import Tokenizer
from gateway.generation import ServingLimits
from gateway.off_loop import off_loop
from gateway.serving import ServingModel


async def tokenize(
    model: ServingModel, text: str, limits: ServingLimits, *, add_special_tokens: bool, field: str
) -> list[int]:
    """Ids of a text. Raises ContextTooLong for one that can never be a prompt."""
    model.check_length(len(text), limits.max_request_tokens, field=field)
    tokenizer = model.tokenizer
    return await off_loop(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text))


async def detokenize(model: ServingModel, ids: Sequence[int], limits: ServingLimits, *, field: str) -> str:
    """The text of ids, special tokens included. Raises InvalidRequest for an id outside of the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise InvalidRequest(f"{field}: token ids go from 0 to {limits.vocab_size - 1}", field=field)
    return await off_loop(lambda: model.tokenizer.decode(ids, skip_special_tokens=False), len(ids))


def with_special_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Ids of a rendered conversation between the begin and end tokens that the model wants around a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    dressed = tokenizer.encode("a")
    before = next(at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare)
    return [*dressed[:before], *ids, *dressed[before + len(bare) :]]

"""Request fields that change the answer and are not offered: refused by name, never silently ignored.

Anything else that is unknown is ignored (`metadata`, `store`, `user`, ...).
"""

from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest

#: Field and the values that mean "as if it were not there".
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
}
#: The same for fields of one message.
_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "function_call": (),
    "audio": (),
}


def refuse_unsupported(extra: Mapping[str, Any] | None, *, message: int | None = None) -> None:
    """Raise InvalidRequest for the first field that is not offered.

    Args:
        extra: fields that the schema does not list.
        message: index of the message that they are from; None for the body itself.
    """
    table = NEUTRAL if message is None else _NEUTRAL_IN_MESSAGE
    prefix = "" if message is None else f"messages[{message}]."
    for name, value in (extra or {}).items():
        if name in table and value is not None and value not in table[name]:
            raise InvalidRequest(f"{prefix}{name} is not supported", field=prefix + name, code="unsupported_parameter")

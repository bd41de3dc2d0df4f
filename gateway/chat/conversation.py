"""A conversation as both edges give it, checked and in the form that chat templates expect. Text only, so far."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.chat.request import Turn

#: What clients may write, and what the template sees. `developer` is OpenAI's newer word for `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def template_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Messages for the chat template. Raises InvalidRequest naming `messages[i].…`."""
    if not turns:
        raise InvalidRequest("messages must not be empty", field="messages")
    return [_template_message(index, turn) for index, turn in enumerate(turns)]


def _template_message(index: int, turn: Turn) -> dict[str, str]:
    if turn.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"messages[{index}].role must be one of {known}", field=f"messages[{index}].role")
    if turn.content is None:
        raise InvalidRequest(f"messages[{index}].content is missing", field=f"messages[{index}].content")
    message = {"role": ROLES[turn.role], "content": turn.content}
    return message if turn.name is None else message | {"name": turn.name}

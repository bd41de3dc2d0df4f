"""What a server says when it refuses, in words for people."""

import httpx


def refusal(answer: httpx.Response) -> str:
    """The message of an OpenAI error body; without one, the status."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}"

"""The deadline that comes with a gRPC call, as the time limit of a request."""

from common.errors import DeadlineExceeded

#: Deadlines beyond this are as good as none; with less than the other left, as good as past. Seconds.
_LONGEST = 86_400.0
_SHORTEST = 0.001


def seconds_left(time_remaining: float | None) -> float | None:
    """Of what `ServicerContext.time_remaining` says, in seconds; None if there is no limit.

    Raises DeadlineExceeded if it is past: what a client has no time for is no mistake in its request.
    """
    if time_remaining is None or time_remaining > _LONGEST:
        return None
    if time_remaining < _SHORTEST:
        raise DeadlineExceeded("no time was left when the request came")
    return time_remaining

"""How long the transfer thread may sleep: not at all while bytes move, for ever when nobody is there."""

#: While something moves.
MOVING_SECONDS = 100e-6
#: While transfers are open but nothing moves, as when a prompt is just being computed.
WAITING_SECONDS = 1e-3
#: While peers are connected and no transfer is open: often enough to answer a transport's own keepalives.
PAIRED_SECONDS = 50e-3


class Pace:
    """The delay grows from round to round while nothing moves."""

    def __init__(self) -> None:
        self._delay = MOVING_SECONDS

    def delay(self, *, busy: bool, polling: bool, paired: bool) -> float | None:
        """Seconds to sleep unless woken; None: until woken."""
        if busy:
            self._delay = MOVING_SECONDS
            return self._delay
        if polling:
            self._delay = min(WAITING_SECONDS, self._delay * 1.5)
            return self._delay
        self._delay = MOVING_SECONDS
        return PAIRED_SECONDS if paired else None

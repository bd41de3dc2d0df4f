"""How long the transfer thread sleeps, hardly while bytes move and for ever when nobody is there; and its alarm."""

import threading

#: While something moves.
MOVING_SECONDS = 100e-6
#: While transfers are open but nothing moves, as when a prompt is just being computed. What ends such a wait (the
#: last layer, credits, the seal) wakes the thread; a round costs some 50 µs of CPU, which the engine could use.
WAITING_SECONDS = 3e-3
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


class Alarm:
    """Wakes one sleeper. Half the price of a threading.Event with a timeout, which matters at hundreds a second."""

    def __init__(self) -> None:
        #: Unlocked: somebody rang.
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the sleeper, or keep it from falling asleep once."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:
                # Another thread rang in between, which is just as good.
                return

    def sleep(self, seconds: float | None) -> None:
        """Until somebody rings, at most `seconds`."""
        self._lock.acquire(timeout=-1 if seconds is None else seconds)

"""For how long a worker's measured speed is believed.

A worker measures itself while it works. One that once was slow (a hung step, a busy neighbour) would get no work and so
never measure itself again; therefore a measurement that has not changed for a while counts as none, and the next
request may try the worker anew.
"""

import time
from collections.abc import Callable

#: Seconds for which an unchanged measurement is believed.
BELIEVED_SECONDS = 30.0


class BelievedSpeeds:
    """Speeds by any key, in tokens per second; 0 means that nothing is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Last reported speed and since when it is the same.
        self._known: dict[str, tuple[float, float]] = {}

    def believe(self, key: str, reported: float) -> float:
        """`reported`, or 0 if it has been the same for too long."""
        now = self._clock()
        speed, since = self._known.get(key, (0.0, now))
        if speed != reported:
            since = now
            self._known[key] = (reported, now)
        return reported if now - since < BELIEVED_SECONDS else 0.0

    def forget(self, key: str) -> None:
        """It will not be asked for any more."""
        self._known.pop(key, None)

"""Whose turn it is to compile. Pure data: knows no process, no clock and no grammar.

One job runs at a time, so that compiling takes one core at most from what the machine is for. Nobody knows beforehand
how long a job takes, so the one that has had the least goes first: a new job at once; whoever has used up a slice of
processor time without being done is *heavy* and waits until no new job is there, while others like it take turns, slice
by slice. So a job of less than a slice waits for at most a slice of each new job before it, however many heavy ones
there are.

What a heavy job has done so far takes memory. Only a few keep it; the others lose it, little as it is, and begin anew
when there is room.
"""


class Turns:
    """Jobs by number. Lower numbers are older."""

    def __init__(self, *, slice_seconds: float, max_kept: int, max_heavy: int) -> None:
        """
        Args:
            max_kept: heavy jobs that keep what they have done.
            max_heavy: heavy jobs altogether; new ones always have a place.
        """
        assert slice_seconds > 0 and 1 <= max_kept <= max_heavy, f"{max_kept} of {max_heavy}, slices of {slice_seconds}"
        self._slice_seconds = slice_seconds
        self._max_kept = max_kept
        self._max_heavy = max_heavy
        #: Processor time that each job has used, since it last began.
        self._seconds: dict[int, float] = {}
        self._heavy: set[int] = set()

    def __contains__(self, job: int) -> bool:
        return job in self._seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, job: int) -> None:
        """A new job, which has used nothing."""
        assert job not in self._seconds, f"job {job} twice"
        self._seconds[job] = 0.0

    def remove(self, job: int) -> None:
        """It is done, or not wanted any more."""
        del self._seconds[job]
        self._heavy.discard(job)

    def note(self, job: int, seconds: float) -> None:
        """Processor time that the job, whose turn it is, has used since it began."""
        self._seconds[job] = seconds
        if seconds >= self._slice_seconds:
            self._heavy.add(job)

    def restart(self, job: int) -> None:
        """It has lost what it had done."""
        self._seconds[job] = 0.0

    def next(self) -> int | None:
        """Whose turn it is; None if there are no jobs. The same until it has used up its slice or a new one comes."""
        full = len(self._kept) >= self._max_kept
        ready = (job for job, seconds in self._seconds.items() if seconds or not full or job not in self._heavy)
        return min(ready, key=lambda job: (self._slices(job), job), default=None)

    def left(self, job: int) -> float:
        """Processor time until the job's present slice is used up."""
        return (int(self._seconds[job] / self._slice_seconds) + 1) * self._slice_seconds - self._seconds[job]

    def to_restart(self) -> int | None:
        """The job that is to lose what it has done: of those that keep it the one with the fewest slices, the newest of
        several. Because too many keep it, or because it came after one that waits for room: else those that come would
        always be before it."""
        kept = self._kept
        loser = min(kept, key=lambda job: (self._slices(job), -job), default=None)
        if loser is None or len(kept) < self._max_kept:
            return None
        overtakes = self._slices(loser) == 1 and min(self._heavy.difference(kept), default=loser) < loser
        return loser if overtakes or len(kept) > self._max_kept else None

    def surplus(self) -> int | None:
        """The job to be ended because there are too many heavy ones: the newest of them."""
        return max(self._heavy) if len(self._heavy) > self._max_heavy else None

    @property
    def _kept(self) -> list[int]:
        """Heavy jobs that have begun."""
        return [job for job in self._heavy if self._seconds[job]]

    def _slices(self, job: int) -> int:
        """Whole ones that it has used; a heavy one that begins anew is not new."""
        return max(int(job in self._heavy), int(self._seconds[job] / self._slice_seconds))

"""`minimum`, `maximum`, `multipleOf` and the exclusive ones of schemas that hold together, as one range."""

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from gateway.structured.complaints import Complaints, Place
from gateway.structured.schema.alternatives import Number
from gateway.structured.schema.branches import Branch

#: The compiler's limits: decimals of a bounded number, its greatest magnitude, and what `multipleOf` can be.
_DECIMALS = 6
MAX_MAGNITUDE = 2**53
_MAX_MAGNITUDE_WITH_DECIMALS = 10**9
_MAX_WHOLE = 2**63 - 1
_MAX_MULTIPLE = 1024
_MAX_MULTIPLE_RANGE = 10_000


@dataclass(frozen=True, slots=True)
class _Bound:
    value: Fraction
    #: The value itself is outside.
    exclusive: bool
    place: Place


def number(branch: Branch, complaints: Complaints, *, whole: bool) -> Number | None:
    """None if no number is in range. Raises InvalidRequest if strict and not all can be enforced."""
    low, high = _tightest(branch, low=True), _tightest(branch, low=False)
    multiple, forces_whole = _multiple(branch, complaints, whole=whole)
    if whole or forces_whole:
        return _whole(low, high, multiple, branch, complaints)
    return _real(low, high, complaints)


def exact(value: float) -> Fraction:
    """The number that a JSON number says."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _tightest(branch: Branch, *, low: bool) -> _Bound | None:
    best: _Bound | None = None
    for member in branch:
        for keyword, exclusive in (("minimum", False), ("exclusiveMinimum", True)) if low else _UPPER:
            if keyword not in member.schema:
                continue
            bound = _Bound(exact(member.schema[keyword]), exclusive, (*member.place, keyword))
            if best is None or _tighter(bound, best, low=low):
                best = bound
    return best


_UPPER = (("maximum", False), ("exclusiveMaximum", True))


def _tighter(bound: _Bound, other: _Bound, *, low: bool) -> bool:
    if bound.value == other.value:
        return bound.exclusive
    return (bound.value > other.value) is low


def _multiple(branch: Branch, complaints: Complaints, *, whole: bool) -> tuple[int | None, bool]:
    """What whole numbers must be multiples of, and whether that makes a number whole."""
    total = 1
    forces_whole = False
    for member in branch:
        if "multipleOf" not in member.schema:
            continue
        step = exact(member.schema["multipleOf"])
        if step.denominator != 1 and not whole:
            complaints.unenforced((*member.place, "multipleOf"), "`multipleOf` a number that is not whole")
            continue
        forces_whole = True
        total = math.lcm(total, step.numerator)
        if total > _MAX_MULTIPLE:
            complaints.unenforced((*member.place, "multipleOf"), f"`multipleOf` above {_MAX_MULTIPLE}")
            return None, forces_whole
    return (total if total > 1 else None), forces_whole


def _whole(
    low: _Bound | None, high: _Bound | None, multiple: int | None, branch: Branch, complaints: Complaints
) -> Number | None:
    least = None if low is None else math.floor(low.value) + 1 if low.exclusive else math.ceil(low.value)
    most = None if high is None else math.ceil(high.value) - 1 if high.exclusive else math.floor(high.value)
    if low is not None and least is not None and least > _MAX_WHOLE:
        complaints.unenforced(low.place, "a bound beyond 64 bits")
        least = None
    if high is not None and most is not None and most < -_MAX_WHOLE:
        complaints.unenforced(high.place, "a bound beyond 64 bits")
        most = None
    least = None if least is None else max(least, -_MAX_WHOLE)
    most = None if most is None else min(most, _MAX_WHOLE)
    if least is not None and most is not None and least > most:
        return None
    if multiple is not None and (least is not None or most is not None):
        if least is None or most is None or most - least >= _MAX_MULTIPLE_RANGE:
            place = next((*member.place, "multipleOf") for member in branch if "multipleOf" in member.schema)
            complaints.unenforced(
                place, f"`multipleOf` with bounds that are not both there and within {_MAX_MULTIPLE_RANGE}"
            )
            multiple = None
        elif most // multiple * multiple < least:
            return None
    return Number(True, least, most, multiple=multiple)


def _real(low: _Bound | None, high: _Bound | None, complaints: Complaints) -> Number | None:
    if low is not None and low.value > MAX_MAGNITUDE:
        complaints.unenforced(low.place, "a bound beyond 2^53")
        low = None
    if high is not None and high.value < -MAX_MAGNITUDE:
        complaints.unenforced(high.place, "a bound beyond 2^53")
        high = None
    if low is not None and high is not None and _crossed(low, high):
        return None
    least = None if low is None else max(_on_grid(low, up=True), Fraction(-MAX_MAGNITUDE))
    most = None if high is None else min(_on_grid(high, up=False), Fraction(MAX_MAGNITUDE))
    above_low = low is not None and low.exclusive and least == low.value
    below_high = high is not None and high.exclusive and most == high.value
    if least is not None and most is not None and low is not None:
        if least > most or (least == most and (above_low or below_high)):
            raise complaints.wrong(low.place, f"no number of at most {_DECIMALS} decimals is within the bounds")
        step = Fraction(1, 10**_DECIMALS)
        if above_low and below_high and most - least <= step:
            raise complaints.wrong(low.place, f"no number of at most {_DECIMALS} decimals is within the bounds")
    return Number(False, _plain(least), _plain(most), above_low, below_high)


def _crossed(low: _Bound, high: _Bound) -> bool:
    return low.value > high.value or (low.value == high.value and (low.exclusive or high.exclusive))


def _on_grid(bound: _Bound, *, up: bool) -> Fraction:
    """The nearest number inside that has few enough decimals."""
    step = 10**_DECIMALS if abs(bound.value) < _MAX_MAGNITUDE_WITH_DECIMALS else 1
    scaled = bound.value * step
    return Fraction(math.ceil(scaled) if up else math.floor(scaled), step)


def _plain(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return value.numerator if value.denominator == 1 else float(value)

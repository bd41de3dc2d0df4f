"""Values of `format` as regular expressions: what matches is valid, but not all that is valid matches."""

from collections.abc import Mapping

from gateway.structured.regex.forms import full_match
from gateway.structured.regex.parse import parse_regex
from gateway.structured.regex.tree import Node

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_LEAP_YEAR = r"((0[48]|[2468][048]|[13579][26])00|\d\d(0[48]|[2468][048]|[13579][26]))"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_HEX = "[0-9a-f]{1,4}"
_IPV6 = "|".join(
    [rf"({_HEX}:){{7}}{_HEX}", rf"::(ffff:)?{_IPV4}", rf"::({_HEX}(:{_HEX}){{0,6}})?"]
    + [rf"{_HEX}(:{_HEX}){{{n - 1}}}::({_HEX}(:{_HEX}){{0,{6 - n}}})?" for n in range(1, 7)]
    + [rf"({_HEX}:){{7}}:"]
)
#: Labels may be longer than the 63 characters of `hostname`: counting them takes the compiler seconds.
_LABEL = r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_UNIT = r"\d{1,9}"
_CLOCK = rf"T({_UNIT}H({_UNIT}M({_UNIT}S)?)?|{_UNIT}M({_UNIT}S)?|{_UNIT}S)"
_DAYS = rf"({_UNIT}Y({_UNIT}M({_UNIT}D)?)?|{_UNIT}M({_UNIT}D)?|{_UNIT}D)"
_URI_CHARACTER = r"([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_URI_TAIL = rf"{_URI_CHARACTER}*(\?({_URI_CHARACTER}|\?)*)?(#({_URI_CHARACTER}|\?)*)?"
_AUTHORITY = rf"//{_HOST}(:\d{{1,5}})?(/{_URI_TAIL})?"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_UNIT}W)",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:({_AUTHORITY}|[A-Za-z0-9]{_URI_TAIL})",
    "json-pointer": r"(/([^/~]|~[01])*)*",
}

#: Of these, what matches need not be valid.
APPROXIMATE = frozenset({"hostname"})


def format_tree(name: str) -> Node | None:
    """Strings of a format; None if it is not known."""
    if name not in FORMATS:
        return None
    return full_match(parse_regex(FORMATS[name]))

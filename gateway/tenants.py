"""API keys and the tenants that they stand for. Knows no edge, and of a key only its digest.

A tenant is whom requests are accounted to: its share of the queue, and its part of the prefix caches. Without keys
everything is open and belongs to one tenant.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from common.errors import ConfigError, Unauthenticated

DEFAULT_TENANT = "default"
#: A tenant without a name of its own is called by so much of its key's digest (hexadecimal digits).
_NAME_DIGITS = 12
#: One prompt token moves a tenant's clock in the queue by 1000 / weight, which must not become nothing.
MAX_WEIGHT = 1000

_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
#: What a header can carry and a line can hold: printable ASCII without spaces.
_KEY = re.compile(r"[!-~]{1,512}")
_WEIGHT = re.compile(r"[0-9]{1,4}")
_BEARER = re.compile(r"(?i:bearer) +([!-~]+) *")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request belongs to."""

    name: str = DEFAULT_TENANT
    #: Told apart from others by a key: prefix caches are not shared with them.
    isolated: bool = False

    def salted(self, salt: str) -> str:
        """What separates this tenant's prefix caches for a caller's salt; one that others know is of no use to them.

        The salt itself goes no further than the gateway then. Fields are framed, so ("ab", "c") and ("a", "bc") differ.
        """
        if not self.isolated:
            return salt
        name = self.name.encode()
        return hashlib.sha256(len(name).to_bytes(8, "little") + name + salt.encode()).hexdigest()


#: Everybody, as long as there are no keys.
EVERYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One key as an operator wrote it; `tenant` is "" if none was named."""

    key: str = field(repr=False)
    tenant: str = ""
    weight: int = 1


class ApiKeys:
    """Whose key is that? With no keys at all, everybody is let in."""

    def __init__(self, lines: Iterable[KeyLine] = ()) -> None:
        """Raises ConfigError for a key of two tenants, or a tenant of two weights; messages hold no key."""
        self._tenants: dict[bytes, str] = {}
        self._weights: dict[str, int] = {}
        for line in lines:
            digest = _digest(line.key)
            tenant = line.tenant or f"key-{digest.hex()[:_NAME_DIGITS]}"
            if self._tenants.setdefault(digest, tenant) != tenant:
                raise ConfigError(f"tenants {self._tenants[digest]} and {tenant} have the same key", field="--api-key")
            if self._weights.setdefault(tenant, line.weight) != line.weight:
                raise ConfigError(f"tenant {tenant} has two weights; no weight means 1", field="--api-key-file")

    @classmethod
    def load(cls, keys: Sequence[str], file: Path | None = None) -> Self:
        """From `--api-key` and `--api-key-file`. Raises ConfigError; messages name lines and hold no key."""
        for number, key in enumerate(keys, 1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"key {number} must be printable ASCII without spaces", field="--api-key")
        return cls([*map(KeyLine, keys), *(read_key_file(file) if file is not None else ())])

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant behind an `Authorization` header, `Bearer KEY`. Raises Unauthenticated.

        Takes the same time for any wrong key: digests are compared, all of them, each in constant time.
        """
        if not self.required:
            return EVERYBODY
        if not authorization:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        given = _BEARER.fullmatch(authorization)
        digest = _digest(given[1] if given is not None else "")
        matches = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, digest)]
        if given is None or not matches:
            raise Unauthenticated("the API key is not valid")
        return Tenant(matches[0], isolated=True)

    def weight_of(self, tenant: str) -> int:
        """Share of a tenant in the queue relative to others."""
        return self._weights.get(tenant, 1)


def read_key_file(path: Path) -> list[KeyLine]:
    """Lines `KEY` or `TENANT:KEY[:WEIGHT]`; empty lines and those that begin with # are skipped.

    Raises ConfigError: the file cannot be read, has no keys, or a line is wrong (named by its number).
    """
    try:
        rows = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}", field="--api-key-file") from error
    numbered = [(number, row.strip()) for number, row in enumerate(rows, 1)]
    lines = [_parse(row, f"{path}, line {number}") for number, row in numbered if row and not row.startswith("#")]
    if not lines:
        # An empty file must not open what its owner wanted closed.
        raise ConfigError(f"{path} has no keys", field="--api-key-file")
    return lines


def _parse(row: str, where: str) -> KeyLine:
    tenant, key, weight = _split(row, where)
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key must be printable ASCII without spaces", field="--api-key-file")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise ConfigError(f"{where}: a tenant is letters, digits and ._@-", field="--api-key-file")
    if not (_WEIGHT.fullmatch(weight) and 1 <= int(weight) <= MAX_WEIGHT):
        raise ConfigError(f"{where}: a weight is a number from 1 to {MAX_WEIGHT}", field="--api-key-file")
    return KeyLine(key, tenant or "", int(weight))


def _split(row: str, where: str) -> tuple[str | None, str, str]:
    """(tenant or None, key, weight)"""
    match row.split(":"):
        case [key]:
            return None, key, "1"
        case [tenant, key]:
            return tenant, key, "1"
        case [tenant, key, weight]:
            return tenant, key, weight
        case _:
            raise ConfigError(f"{where}: KEY or TENANT:KEY[:WEIGHT]", field="--api-key-file")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

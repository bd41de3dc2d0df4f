"""Reads typed fields out of a config.json, so that a bad one is a `ModelError` naming field and value."""

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError


class ConfigFields:
    """The raw config.json; each accessor checks one field. `null` counts as absent."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def refuse(self, field: str, why: str) -> ModelError:
        """The error for `field`, to be raised by the caller."""
        return ModelError(f"config.json: {field} = {self._raw.get(field)!r}: {why}", field=field)

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer; required if there is no default."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refuse(field, "must be a positive integer")
        return value

    def optional_integer(self, field: str, default: int | None) -> int | None:
        """A positive integer, or None where the file says null; `default` where it says nothing."""
        if field not in self._raw:
            return default
        return None if self._raw[field] is None else self.integer(field)

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number; required if there is no default."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(field, "must be a positive number")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.refuse(field, "must be true or false")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.refuse(field, "must be a string")
        return value

    def section(self, field: str) -> "ConfigFields | None":
        """A nested object, if there is one."""
        value = self._raw.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(field, "must be an object")
        return ConfigFields(value)

    def get(self, field: str) -> Any:
        """The raw value, None if absent."""
        return self._raw.get(field)

    def _get(self, field: str, default: Any) -> Any:
        value = self._raw.get(field)
        if value is None and default is None:
            raise ModelError(f"config.json: {field} is missing", field=field)
        return default if value is None else value

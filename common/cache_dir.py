"""Where Tandem keeps what it would otherwise make again: models, compiled kernels, digests."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Tandem's cache: $TANDEM_CACHE_DIR, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem. It need not exist.

    Raises:
        RuntimeError: none of them is known, as for a user without a home.
    """
    if own := os.environ.get("TANDEM_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"

"""The compiled library as Python sees it: one prototype per exported function."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

POINTER, INT, THREADS, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

# As declared in src/*.cpp, where each argument is explained.
PROTOTYPES: dict[str, Sequence[type]] = {
    "tandem_pack": [POINTER, INT, INT, INT, POINTER, THREADS],
    "tandem_linear": [POINTER, INT, INT, POINTER, POINTER, INT, INT, POINTER, THREADS],
    "tandem_rms_norm": [POINTER, INT, POINTER, FLOAT, POINTER, INT, INT, THREADS],
    "tandem_add_rms_norm": [POINTER, POINTER, POINTER, FLOAT, INT, INT, THREADS],
    "tandem_rope_and_store": [POINTER, INT] * 3 + [POINTER] * 5 + [INT, POINTER] + [INT] * 5 + [THREADS],
    "tandem_silu_and_mul": [POINTER, POINTER, INT, INT, THREADS],
    "tandem_paged_attention": [POINTER, INT, POINTER, POINTER, INT, POINTER, INT, POINTER, POINTER]
    + [INT] * 5
    + [FLOAT, POINTER, THREADS],
}


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare its functions. Calls release the GIL."""
    library = ctypes.CDLL(str(path))
    for name, arguments in PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.tandem_panel_width.argtypes, library.tandem_panel_width.restype = [], INT
    return library

"""The safetensors files of a model folder: what tensors they hold, where, and the bytes.

Reads headers by itself (the format is eight bytes of length and a JSON object), so that names, shapes and places of
all tensors are known without touching data. Knows nothing of models.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.loader.folder import read_json
from common.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: No sane header is longer; a corrupt length must not make us allocate it.
MAX_HEADER_BYTES = 100_000_000
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies."""

    path: Path
    #: As safetensors spells it: F32, BF16, ...
    dtype: str
    shape: tuple[int, ...]
    #: First byte in the file, and how many.
    offset: int
    num_bytes: int


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the folder's checkpoint, by name.

    Raises:
        ModelError: there is none, a shard is missing, or a header is damaged.
    """
    entries: dict[str, TensorEntry] = {}
    for path in _files(folder):
        entries |= _read_header(path)
    return entries


class TensorReader:
    """Copies tensors out of a checkpoint one at a time; a context manager."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._open_path: Path | None = None
        self._open: Any = None

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy tensor `name` into `target` (same shape), converting the dtype.

        Raises:
            ModelError: the file is damaged.
        """
        path = self._entries[name].path
        try:
            target.copy_(self._file(path).get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {path}: {error}") from error

    def _file(self, path: Path) -> Any:
        """One file is open at a time: tensors come in the order of layers, which is the order of shards."""
        if path != self._open_path:
            self._close()
            self._open = safe_open(path, framework="pt", device="cpu")
            self._open.__enter__()
            self._open_path = path
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open, self._open_path = None, None


def _files(folder: Path) -> list[Path]:
    """The checkpoint's files, those of a sharded one in order of name."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors can be loaded")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{folder / INDEX_FILE}: weight_map is missing or not a map of names to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder / INDEX_FILE}: weight_map names {name!r}, which is not a file of the folder")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            return _parse_header(path, file)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error!r}") from error


def _parse_header(path: Path, file: BinaryIO) -> dict[str, TensorEntry]:
    """Raises ValueError (or what indexing a malformed header raises) if the file is damaged."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes")
    header = json.loads(file.read(length))
    size = os.fstat(file.fileno()).st_size
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        begin, end = fields["data_offsets"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} lies at {begin}..{end} of {size - 8 - length} data bytes")
        entries[name] = TensorEntry(path, fields["dtype"], tuple(fields["shape"]), 8 + length + begin, end - begin)
    return entries


def check_tensor(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raises ModelError unless tensor `name` has `shape` and a dtype that can be loaded."""
    if entry.shape != shape:
        raise ModelError(f"{name} has shape {list(entry.shape)}; config.json implies {list(shape)}")
    if entry.dtype not in FLOAT_DTYPES:
        raise ModelError(f"{name} has dtype {entry.dtype}; supported are {', '.join(FLOAT_DTYPES)}")
    expected = math.prod(shape) * FLOAT_DTYPES[entry.dtype].itemsize
    if entry.num_bytes != expected:
        raise ModelError(f"{name} has {entry.num_bytes} bytes; shape and dtype need {expected}")

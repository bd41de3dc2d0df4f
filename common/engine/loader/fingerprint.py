"""A short name for the weights in a folder, by which two workers can tell that they serve the same model.

Every byte of every tensor counts. Reading them all is little beside loading them, and is shared out over threads: on
one core SHA-256 takes 0.8 to 2 GB/s, so that a model of 0.5 GB takes half a second and one of 16 GB ten on one core,
less than two on eight; once for as long as the files stay as they are, if a memo is given.

It tells apart: models of which any element, name, shape or stored dtype differs, or a field of config.json that is not
in `VOLATILE_FIELDS`. It does not tell apart: copies, however sharded; what a worker makes of the weights (the dtype it
computes in is a field of the manifest of its own); tokenizers and templates, which have a fingerprint of their own. It
is no proof against a peer that lies.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from common.engine.loader.checkpoint import TensorEntry, list_tensors
from common.engine.loader.folder import read_config
from common.errors import ModelError
from common.file_memo import FileMemo

#: Fields of config.json that do not change what the model computes.
VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
#: A tensor is hashed in pieces of so many bytes, and then their hashes are: large ones occupy all threads, too.
PIECE_BYTES = 8 << 20
#: Read at a time, so that what is hashed is still in the processor's cache.
_BUFFER_BYTES = 1 << 18
#: Names how the digest is made; changes with it, so that nothing is recalled that was made in another way.
_MEMO_NAME = "weights-sha256-8m"


def weights_fingerprint(folder: Path, memo: FileMemo | None = None) -> str:
    """32 hex digits over the config and all tensors' names, shapes, stored dtypes and bytes.

    Threads are as many as `torch.get_num_threads()` says.

    Args:
        memo: where the digest of the weights is looked up and kept; None: computed anew.

    Raises:
        ModelError: the folder is not a readable checkpoint.
    """
    config = {k: v for k, v in read_config(folder).items() if k not in VOLATILE_FIELDS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    digest.update(_digest_of_tensors(list_tensors(folder), memo).encode())
    return digest.hexdigest()[:32]


def _digest_of_tensors(entries: dict[str, TensorEntry], memo: FileMemo | None) -> str:
    try:
        if memo is None or not entries:
            return _hash_tensors(entries)
        files = sorted({entry.path for entry in entries.values()})
        return memo.recall(_MEMO_NAME, files, lambda: _hash_tensors(entries))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error


def _hash_tensors(entries: dict[str, TensorEntry]) -> str:
    digest = hashlib.sha256()
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="fingerprint") as threads:
        by_name = sorted(entries.items())
        hashes = threads.map(_hash_piece, [piece for _, entry in by_name for piece in _pieces(entry)])
        for name, entry in by_name:
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            for _ in _pieces(entry):
                digest.update(next(hashes))
    return digest.hexdigest()


class _Piece(NamedTuple):
    """`num_bytes` of a file from `offset` on."""

    path: Path
    offset: int
    num_bytes: int


def _pieces(entry: TensorEntry) -> Iterator[_Piece]:
    for start in range(0, entry.num_bytes, PIECE_BYTES):
        yield _Piece(entry.path, entry.offset + start, min(PIECE_BYTES, entry.num_bytes - start))


def _hash_piece(piece: _Piece) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, piece.num_bytes)))
    left = piece.num_bytes
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while left:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise ModelError(f"{piece.path} has become shorter while it was read")
            digest.update(buffer[:count])
            left -= count
    return digest.digest()

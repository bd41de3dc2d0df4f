"""A short name for the weights in a folder, by which two workers can tell that they serve the same model."""

import hashlib
import json
from pathlib import Path

from common.engine.loader.checkpoint import TensorEntry, list_tensors
from common.engine.loader.folder import read_config

#: Bytes of each tensor that are looked at: enough to tell fine-tunes apart, few enough to stay quick.
SAMPLE_BYTES = 4096
#: Fields of config.json that do not change what the model computes.
VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


def weights_fingerprint(folder: Path) -> str:
    """32 hex digits over the config, all tensors' names, shapes and stored dtypes, and the first bytes of each.

    The same for a copy of the folder and however the tensors are spread over shards; the dtype that a worker
    computes in is not part of it.

    Raises:
        ModelError: the folder is not a readable checkpoint.
    """
    config = {k: v for k, v in read_config(folder).items() if k not in VOLATILE_FIELDS}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for name, entry in sorted(list_tensors(folder).items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        digest.update(_sample(entry))
    return digest.hexdigest()


def _sample(entry: TensorEntry) -> bytes:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(min(SAMPLE_BYTES, entry.num_bytes))

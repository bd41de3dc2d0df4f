"""Do two workers fit together? Compares manifests field by field and says in words what differs."""

from common.errors import ManifestMismatch
from common.pb.tandem.v1.worker_pb2 import Manifest

#: Versions of the wire protocol spoken by this build; raise the upper one when a message changes meaning,
#: the lower one when an old version is dropped.
WIRE_VERSION_MIN = 1
WIRE_VERSION_MAX = 1

_EQUAL_FIELDS = (
    "model",
    "weights_fingerprint",
    "tokenizer_fingerprint",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "kv_dtype",
    "vocab_size",
    "max_model_len",
)


def manifest_differences(ours: Manifest, theirs: Manifest) -> list[str]:
    """One sentence per field that keeps the two from working together; empty if they fit."""
    differences = [
        f"{name}: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
        for name in _EQUAL_FIELDS
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.wire_version_min > theirs.wire_version_max or theirs.wire_version_min > ours.wire_version_max:
        differences.append(
            f"wire version: {ours.wire_version_min} to {ours.wire_version_max} here, "
            f"{theirs.wire_version_min} to {theirs.wire_version_max} there"
        )
    return differences


def require_match(ours: Manifest, theirs: Manifest, *, peer: str) -> None:
    """Raise ManifestMismatch, naming each differing field and both values, unless the two fit."""
    differences = manifest_differences(ours, theirs)
    if differences:
        raise ManifestMismatch(
            f"cannot pair with {peer}: " + "; ".join(differences), field=differences[0].split(":")[0]
        )

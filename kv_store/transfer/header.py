"""Making and judging the header of a KV message. Pure: touches no memory, no books."""

import zlib

from google.protobuf.message import DecodeError
from torch import Tensor

from common.pb.tandem.v1.transport_pb2 import KvHeader
from kv_store.layout import KVShape, MessageRange
from kv_store.staging import SlotGrant

#: The one memory region there is so far.
REGION = "kv"


def parse_header(payload: bytes) -> KvHeader | None:
    """The header in a notification; None if it is none."""
    try:
        return KvHeader.FromString(payload)
    except DecodeError:
        return None


def make_header(
    transfer_id: int, sender: str, receiver: str, grant: SlotGrant, part: MessageRange, byte_count: int, sequence: int
) -> KvHeader:
    """The header of a message of all heads but for `num_heads` and the checksum, which the caller adds."""
    return KvHeader(
        transfer_id=transfer_id,
        sender=sender,
        receiver=receiver,
        slot=grant.slot,
        generation=grant.generation,
        first_layer=part.first_layer,
        num_layers=part.num_layers,
        first_token=part.first_token,
        num_tokens=part.num_tokens,
        region=REGION,
        byte_count=byte_count,
        sequence=sequence,
    )


def checksum(wire: Tensor) -> int:
    """crc32 of a payload (uint8, contiguous, any device)."""
    return zlib.crc32(wire.cpu().numpy().data)


def range_error(header: KvHeader, shape: KVShape, first_token: int, num_tokens: int) -> str | None:
    """Why `header` does not fit a transfer of tokens [first_token, +num_tokens); None if it does."""
    if header.region != REGION:
        return f"region {header.region!r}"
    if header.num_layers == 0 or header.first_layer + header.num_layers > shape.num_layers:
        return f"layers {header.first_layer}+{header.num_layers} of {shape.num_layers}"
    if header.first_head != 0 or header.num_heads != shape.kv_heads:
        return f"heads {header.first_head}+{header.num_heads} of {shape.kv_heads}"
    end = header.first_token + header.num_tokens
    if header.num_tokens == 0 or header.first_token < first_token or end > first_token + num_tokens:
        return f"tokens {header.first_token}+{header.num_tokens} of {first_token}+{num_tokens}"
    return None


def size_error(header: KvHeader, shape: KVShape, slot_bytes: int) -> str | None:
    """Why the stated size is not what the ranges need; None if it is."""
    expected = shape.message_bytes(header.num_layers, header.num_tokens)
    if header.byte_count != expected or expected > slot_bytes:
        return f"{header.byte_count} bytes stated, {expected} needed, slots hold {slot_bytes}"
    return None

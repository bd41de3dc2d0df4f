from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TransportPeer(_message.Message):
    __slots__ = ("transport", "agent", "metadata", "staging_base", "slot_bytes", "num_slots", "host_id", "pid", "process_start")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STAGING_BASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_START_FIELD_NUMBER: _ClassVar[int]
    transport: str
    agent: str
    metadata: bytes
    staging_base: int
    slot_bytes: int
    num_slots: int
    host_id: str
    pid: int
    process_start: int
    def __init__(self, transport: _Optional[str] = ..., agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., staging_base: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ..., host_id: _Optional[str] = ..., pid: _Optional[int] = ..., process_start: _Optional[int] = ...) -> None: ...

class SlotGrant(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class KvHeader(_message.Message):
    __slots__ = ("transfer_id", "sender", "receiver", "slot", "generation", "first_layer", "num_layers", "first_token", "num_tokens", "first_head", "num_heads", "region", "byte_count", "sequence", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    sender: str
    receiver: str
    slot: int
    generation: int
    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int
    region: str
    byte_count: int
    sequence: int
    checksum: int
    def __init__(self, transfer_id: _Optional[int] = ..., sender: _Optional[str] = ..., receiver: _Optional[str] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., region: _Optional[str] = ..., byte_count: _Optional[int] = ..., sequence: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("agent", "write_id", "offset", "payload", "notification")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATION_FIELD_NUMBER: _ClassVar[int]
    agent: str
    write_id: int
    offset: int
    payload: bytes
    notification: bytes
    def __init__(self, agent: _Optional[str] = ..., write_id: _Optional[int] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., notification: _Optional[bytes] = ...) -> None: ...

class KvAck(_message.Message):
    __slots__ = ("write_id",)
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    def __init__(self, write_id: _Optional[int] = ...) -> None: ...

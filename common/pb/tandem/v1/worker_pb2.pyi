from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class Manifest(_message.Message):
    __slots__ = ("wire_version_min", "wire_version_max", "model", "weights_fingerprint", "tokenizer_fingerprint", "num_layers", "num_kv_heads", "head_dim", "kv_dtype", "vocab_size", "max_model_len")
    WIRE_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    wire_version_min: int
    wire_version_max: int
    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    vocab_size: int
    max_model_len: int
    def __init__(self, wire_version_min: _Optional[int] = ..., wire_version_max: _Optional[int] = ..., model: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "owned", "block_size")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    owned: int
    block_size: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., owned: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class StagingCounts(_message.Message):
    __slots__ = ("total", "free", "granted", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    granted: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., granted: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "pid", "address", "state", "blocks", "staging", "running", "waiting", "queued_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "max_request_tokens", "paired", "refused", "transfers", "dropped_messages", "accepted_total", "finished_total", "cancelled_total", "failed_total", "preemptions_total", "tokens_computed_total", "tokens_cached_total", "tokens_decoded_total", "transfer_bytes_sent_total", "transfer_bytes_received_total", "steps_total", "busy_seconds_total")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CACHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DECODED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_SENT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_RECEIVED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    incarnation: str
    pid: int
    address: str
    state: WorkerState
    blocks: BlockCounts
    staging: StagingCounts
    running: int
    waiting: int
    queued_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    max_request_tokens: int
    paired: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.RepeatedScalarFieldContainer[str]
    transfers: int
    dropped_messages: int
    accepted_total: int
    finished_total: int
    cancelled_total: int
    failed_total: int
    preemptions_total: int
    tokens_computed_total: int
    tokens_cached_total: int
    tokens_decoded_total: int
    transfer_bytes_sent_total: int
    transfer_bytes_received_total: int
    steps_total: int
    busy_seconds_total: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., staging: _Optional[_Union[StagingCounts, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_tokens_per_second: _Optional[float] = ..., max_request_tokens: _Optional[int] = ..., paired: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[str]] = ..., transfers: _Optional[int] = ..., dropped_messages: _Optional[int] = ..., accepted_total: _Optional[int] = ..., finished_total: _Optional[int] = ..., cancelled_total: _Optional[int] = ..., failed_total: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., tokens_computed_total: _Optional[int] = ..., tokens_cached_total: _Optional[int] = ..., tokens_decoded_total: _Optional[int] = ..., transfer_bytes_sent_total: _Optional[int] = ..., transfer_bytes_received_total: _Optional[int] = ..., steps_total: _Optional[int] = ..., busy_seconds_total: _Optional[float] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

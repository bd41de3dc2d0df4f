from common.pb.tandem.v1 import generation_pb2 as _generation_pb2
from common.pb.tandem.v1 import transport_pb2 as _transport_pb2
from common.pb.tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_OUTCOME_UNSPECIFIED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_OK: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_CANCELLED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_SHORTAGE: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_REJECTED: _ClassVar[TransferOutcome]
    TRANSFER_OUTCOME_FAILED: _ClassVar[TransferOutcome]
TRANSFER_OUTCOME_UNSPECIFIED: TransferOutcome
TRANSFER_OUTCOME_OK: TransferOutcome
TRANSFER_OUTCOME_CANCELLED: TransferOutcome
TRANSFER_OUTCOME_SHORTAGE: TransferOutcome
TRANSFER_OUTCOME_REJECTED: TransferOutcome
TRANSFER_OUTCOME_FAILED: TransferOutcome

class PrefillCommand(_message.Message):
    __slots__ = ("hello", "run", "cancel", "credit", "grammar")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    run: RunRequest
    cancel: CancelTransfer
    credit: Credit
    grammar: CompiledGrammar
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., run: _Optional[_Union[RunRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelTransfer, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., grammar: _Optional[_Union[CompiledGrammar, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("hello", "first", "progress", "terminal", "prompt_logprobs", "grammar_wanted")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_WANTED_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    first: First
    progress: Progress
    terminal: Terminal
    prompt_logprobs: PromptLogprobs
    grammar_wanted: GrammarWanted
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., first: _Optional[_Union[First, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., terminal: _Optional[_Union[Terminal, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., grammar_wanted: _Optional[_Union[GrammarWanted, _Mapping]] = ...) -> None: ...

class PairHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "manifest", "transport")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    manifest: _worker_pb2.Manifest
    transport: _transport_pb2.TransportPeer
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., manifest: _Optional[_Union[_worker_pb2.Manifest, _Mapping]] = ..., transport: _Optional[_Union[_transport_pb2.TransportPeer, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("transfer_id", "request_id", "prompt_ids", "first_token", "first_choices", "sampling", "cache_salt", "traceparent", "compiled_grammar", "grammar_digest")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    COMPILED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    first_choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    cache_salt: str
    traceparent: str
    compiled_grammar: bytes
    grammar_digest: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ..., first_choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., compiled_grammar: _Optional[bytes] = ..., grammar_digest: _Optional[bytes] = ...) -> None: ...

class GrammarWanted(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class CompiledGrammar(_message.Message):
    __slots__ = ("transfer_id", "compiled_grammar")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPILED_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    compiled_grammar: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., compiled_grammar: _Optional[bytes] = ...) -> None: ...

class CancelTransfer(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("grants",)
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[_transport_pb2.SlotGrant]
    def __init__(self, grants: _Optional[_Iterable[_Union[_transport_pb2.SlotGrant, _Mapping]]] = ...) -> None: ...

class First(_message.Message):
    __slots__ = ("transfer_id", "tokens", "cached_tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_tokens: int
    def __init__(self, transfer_id: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    logprobs: _generation_pb2.TokenLogprobs
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("transfer_id", "first_position", "entries")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    first_position: int
    entries: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    def __init__(self, transfer_id: _Optional[int] = ..., first_position: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("transfer_id", "tokens_done")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    tokens_done: int
    def __init__(self, transfer_id: _Optional[int] = ..., tokens_done: _Optional[int] = ...) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("transfer_id", "outcome", "message", "messages", "bytes", "cached_tokens", "computed_tokens", "prefill_seconds", "since_compute_seconds", "transfer_seconds")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    outcome: TransferOutcome
    message: str
    messages: int
    bytes: int
    cached_tokens: int
    computed_tokens: int
    prefill_seconds: float
    since_compute_seconds: float
    transfer_seconds: float
    def __init__(self, transfer_id: _Optional[int] = ..., outcome: _Optional[_Union[TransferOutcome, str]] = ..., message: _Optional[str] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., since_compute_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ...) -> None: ...

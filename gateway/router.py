"""Where a request goes: ranks decode workers, and for each the prefill workers to ask, by estimated seconds.

A pure function of snapshots. Prefilling locally on the decode worker is always a candidate; it is expressed by an
empty (or shorter) list of prefill workers, because a decode worker whose list is used up prefills locally.

    local  = queue + compute(uncached on decode) + stall of the streams that run there
    remote = queue + compute(uncached on prefill) + the part of the transfer that compute does not hide
    decode = time to write the output in its batch + penalty if the blocks do not suffice
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from common.pb.tandem.v1 import decode_pb2 as pb

#: Tokens per second of a worker that has not measured itself and knows no peer that has.
DEFAULT_PREFILL_SPEED = 2_000.0
DEFAULT_DECODE_SPEED = 100.0
#: What a remote prefill costs beside compute: one more hop, the first credits, the last message.
REMOTE_OVERHEAD = 0.005
#: Part of a local prefill that each running stream feels as a stall.
LOCAL_STALL = 0.5
#: Local prefill must be that much cheaper to be taken before a prefill worker: hysteresis against flapping.
LOCAL_ADVANTAGE = 0.8
#: Outputs end early more often than at max_tokens.
EXPECTED_OUTPUT = 256
#: Seconds that a request waits at worst where no block is free.
SHORTAGE_SECONDS = 10.0


class PrefillPolicy(Enum):
    """Which side computes prompts."""

    #: Whichever is estimated to be faster.
    COST = "cost"
    #: A prefill worker, whenever one is alive and paired; short prompts (`local_prefill_tokens`) excepted.
    REMOTE = "remote"
    #: The decode worker itself: serving without disaggregation.
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router needs to know of one worker. Tokens and tokens per second; speeds are 0 until measured."""

    worker_id: str
    address: str
    #: Prompt tokens accepted or on their way, not yet computed.
    queued_tokens: int = 0
    prefill_speed: float = 0.0
    decode_speed: float = 0.0
    #: Requests in the batch, waiting, or on their way.
    requests: int = 0
    #: Blocks that are free or can be freed, of `total_blocks`; tokens in one of them.
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    #: Longest prompt plus output that fits.
    max_request_tokens: int = 0
    #: Worker ids or addresses with which this one cannot be paired.
    refused: frozenset[str] = frozenset()
    #: Tokens of this request's prompt whose KV it probably holds.
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """The request, as far as routing goes."""

    prompt_tokens: int
    #: Upper bound of output tokens of each choice.
    max_tokens: int
    num_choices: int = 1
    #: Size of one token's KV over all layers; 0: not known, transfers count as free.
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One decode worker to try, with its prefill workers, best first. No candidate: prefill locally."""

    worker_id: str
    address: str
    candidates: tuple[pb.PrefillCandidate, ...]
    #: Estimated seconds, for logs and spans.
    cost: float
    #: Prompt tokens that will probably have to be computed.
    uncached_tokens: int


class Router:
    """The cost model with its constants."""

    def __init__(
        self, *, local_prefill_tokens: int, policy: PrefillPolicy = PrefillPolicy.COST, bandwidth: float = 1e9
    ) -> None:
        """
        Args:
            local_prefill_tokens: prompts with at most so many uncached tokens are always prefilled locally.
            policy: whether estimates decide between local and remote prefill, or one of them is always taken.
            bandwidth: bytes per second between two workers.
        """
        self._local_prefill_tokens = local_prefill_tokens
        self._policy = policy
        self._bandwidth = bandwidth

    def rank(self, query: RouteQuery, decode: Sequence[WorkerLoad], prefill: Sequence[WorkerLoad]) -> tuple[Route, ...]:
        """Decode workers that could hold the request, best first; empty if there is none."""
        speed = _fallback_speed([*prefill, *decode])
        fitting = [d for d in decode if query.prompt_tokens + query.max_tokens <= d.max_request_tokens]
        routes = [self._route(query, worker, prefill, speed) for worker in fitting]
        return tuple(sorted(routes, key=lambda route: (route.cost, route.worker_id)))

    def _route(self, query: RouteQuery, decode: WorkerLoad, prefill: Sequence[WorkerLoad], speed: float) -> Route:
        local = _local_seconds(query, decode, speed)
        able = [worker for worker in prefill if _may_pair(decode, worker)]
        remote = sorted(
            ((self._remote_seconds(query, decode, worker, speed), worker) for worker in able),
            key=lambda entry: (entry[0], entry[1].worker_id),
        )
        uncached = _uncached(query, decode)
        worthwhile = [(seconds, worker) for seconds, worker in remote if self._goes_out(uncached, seconds, local)]
        best = worthwhile[0][0] if worthwhile else local
        if worthwhile:
            uncached = _uncached(query, worthwhile[0][1])
        return Route(
            decode.worker_id,
            decode.address,
            tuple(pb.PrefillCandidate(worker_id=w.worker_id, address=w.address) for _, w in worthwhile),
            best + _decode_seconds(query, decode),
            uncached,
        )

    def _goes_out(self, uncached: int, remote: float, local: float) -> bool:
        """Whether a prefill worker is asked that takes `remote` seconds where the decode worker takes `local`."""
        if self._policy is PrefillPolicy.LOCAL or uncached <= self._local_prefill_tokens:
            return False
        return self._policy is PrefillPolicy.REMOTE or local > LOCAL_ADVANTAGE * remote

    def _remote_seconds(self, query: RouteQuery, decode: WorkerLoad, prefill: WorkerLoad, fallback: float) -> float:
        speed = prefill.prefill_speed or fallback
        compute = _uncached(query, prefill) / speed
        transfer = _uncached(query, decode) * query.kv_bytes_per_token / self._bandwidth
        # The cached part is sent at once, the rest layer by layer behind the compute.
        exposed = max(0.0, transfer - compute)
        return prefill.queued_tokens / speed + compute + exposed + REMOTE_OVERHEAD


def _uncached(query: RouteQuery, worker: WorkerLoad) -> int:
    # The last prompt token is always computed: its logits are wanted.
    return max(1, query.prompt_tokens - worker.overlap)


def _may_pair(decode: WorkerLoad, prefill: WorkerLoad) -> bool:
    return decode.refused.isdisjoint((prefill.worker_id, prefill.address)) and prefill.refused.isdisjoint(
        (decode.worker_id, decode.address)
    )


def _fallback_speed(workers: Sequence[WorkerLoad]) -> float:
    measured = [worker.prefill_speed for worker in workers if worker.prefill_speed > 0]
    return sum(measured) / len(measured) if measured else DEFAULT_PREFILL_SPEED


def _local_seconds(query: RouteQuery, decode: WorkerLoad, fallback: float) -> float:
    speed = decode.prefill_speed or fallback
    compute = _uncached(query, decode) / speed
    return decode.queued_tokens / speed + compute * (1 + LOCAL_STALL * decode.requests)


def _decode_seconds(query: RouteQuery, decode: WorkerLoad) -> float:
    """Seconds to write the output among the streams that are there, and to wait for blocks if they do not suffice."""
    speed = decode.decode_speed or DEFAULT_DECODE_SPEED
    output = min(query.max_tokens, EXPECTED_OUTPUT)
    writing = output * (decode.requests + query.num_choices) / speed
    tokens = _uncached(query, decode) + output * query.num_choices
    needed = -(-tokens // decode.block_size)
    missing = max(0, needed - decode.free_blocks) / needed
    return writing + SHORTAGE_SECONDS * missing

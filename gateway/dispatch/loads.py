"""What this gateway has on its way to each worker, to correct statuses that are up to a second old."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from common.pb.tandem.v1 import worker_pb2 as pb
from gateway.cluster.views import WorkerView
from gateway.dispatch.speeds import BelievedSpeeds
from gateway.router import WorkerLoad


class Load:
    """What one attempt weighs: prompt tokens on whoever prefills until the first token, a request on decode."""

    def __init__(self, owner: "Loads", decode: str, prefill: str, tokens: int) -> None:
        self._owner = owner
        self._decode = decode
        self._prefill = prefill
        self._tokens = tokens
        self._over = False

    def prefilled(self) -> None:
        """The first token came. Idempotent."""
        _take_off(self._owner.tokens, self._prefill, self._tokens)
        self._tokens = 0

    def end(self) -> None:
        """The attempt is over. Idempotent."""
        self.prefilled()
        if not self._over:
            self._over = True
            _take_off(self._owner.requests, self._decode, 1)


def _take_off(sums: Counter[str], worker: str, amount: int) -> None:
    """Workers come and go: nothing is kept for those that have nothing."""
    sums[worker] -= amount
    if not sums[worker]:
        del sums[worker]


class Loads:
    """Sums over the attempts of this gateway, by worker id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._prefill_speeds = BelievedSpeeds(clock)
        self._decode_speeds = BelievedSpeeds(clock)

    def add(self, *, decode: str, prefill: str, tokens: int) -> Load:
        """`prefill` is the decode worker itself if it prefills locally."""
        self.tokens[prefill] += tokens
        self.requests[decode] += 1
        return Load(self, decode, prefill, tokens)

    def forget(self, worker_id: str) -> None:
        """The worker is gone: its speeds are nobody's. What attempts weigh goes with the attempts."""
        self._prefill_speeds.forget(worker_id)
        self._decode_speeds.forget(worker_id)

    def worker_load(self, view: WorkerView, overlap: int) -> WorkerLoad:
        """The router's picture of a routable worker; `overlap`: prompt tokens that it probably holds."""
        assert view.status is not None, f"{view.address} has no status"
        status = view.status
        return WorkerLoad(
            worker_id=view.worker_id,
            address=view.address,
            # Our own part is among what the worker reports, except for what it does not know yet.
            queued_tokens=max(status.queued_tokens, self.tokens[view.worker_id]),
            prefill_speed=self._prefill_speeds.believe(view.worker_id, status.prefill_tokens_per_second),
            decode_speed=self._decode_speeds.believe(view.worker_id, status.decode_tokens_per_second),
            requests=max(status.running + status.waiting, self.requests[view.worker_id]),
            free_blocks=status.blocks.free + status.blocks.cached,
            total_blocks=status.blocks.total,
            block_size=max(1, status.blocks.block_size),
            max_request_tokens=status.max_request_tokens,
            refused=refused_peers(status.refused),
            overlap=overlap,
        )


def refused_peers(refusals: Iterable[str]) -> frozenset[str]:
    """Peers (worker ids or addresses) named in `WorkerStatus.refused`: `peer: reason`."""
    return frozenset(refusal.split(": ", 1)[0] for refusal in refusals)


def kv_bytes_per_token(manifest: pb.Manifest) -> int:
    """Size of one token's KV over all layers."""
    element = {"float32": 4, "float16": 2, "bfloat16": 2}.get(manifest.kv_dtype, 2)
    return 2 * manifest.num_layers * manifest.num_kv_heads * manifest.head_dim * element

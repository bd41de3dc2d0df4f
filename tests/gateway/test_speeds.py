"""How long a measured speed is believed."""

from common.pb.tandem.v1 import worker_pb2 as pb
from gateway.cluster.views import Link, WorkerView
from gateway.dispatch.loads import Loads
from gateway.dispatch.speeds import BELIEVED_SECONDS, BelievedSpeeds
from gateway.router import RouteQuery, Router


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_unchanged_speed_is_believed_for_a_while_and_a_new_one_again() -> None:
    clock = Clock()
    speeds = BelievedSpeeds(clock)
    assert speeds.believe("a", 50.0) == 50.0
    clock.now += BELIEVED_SECONDS - 1
    assert speeds.believe("a", 50.0) == 50.0
    assert speeds.believe("b", 50.0) == 50.0
    clock.now += 1
    assert speeds.believe("a", 50.0) == 0.0
    assert speeds.believe("b", 50.0) == 50.0
    assert speeds.believe("a", 51.0) == 51.0


def test_unmeasured_speed_stays_unknown() -> None:
    assert BelievedSpeeds().believe("a", 0.0) == 0.0


def test_prefill_worker_that_once_was_slow_gets_work_again() -> None:
    clock = Clock()
    loads = Loads(clock)
    slow = _view("prefill", pb.ROLE_PREFILL, speed=10.0)

    def candidates(decode_speed: float) -> list[str]:
        decode = loads.worker_load(_view("decode", pb.ROLE_DECODE, speed=decode_speed), 0)
        router = Router(local_prefill_tokens=32)
        [route] = router.rank(RouteQuery(500, 10), [decode], [loads.worker_load(slow, 0)])
        return [candidate.worker_id for candidate in route.candidates]

    assert candidates(decode_speed=1000.0) == []
    clock.now += BELIEVED_SECONDS
    # The decode worker has gone on measuring.
    assert candidates(decode_speed=1001.0) == ["prefill"]


def _view(name: str, role: pb.Role, *, speed: float) -> WorkerView:
    status = pb.WorkerStatus(
        worker_id=name,
        role=role,
        state=pb.WORKER_STATE_READY,
        blocks=pb.BlockCounts(total=100, free=100, block_size=16),
        prefill_tokens_per_second=speed,
        max_request_tokens=1600,
    )
    return WorkerView(f"host:{name}", "decode" if role == pb.ROLE_DECODE else "prefill", Link.LIVE, status=status)

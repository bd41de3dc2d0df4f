"""Workers that do not fit refuse each other in words, and requests are served right without them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, Judge
from tests.e2e.slow_model import slow_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, make_scratch: Callable[[], Path]) -> Iterator[Judge]:
    """A decode worker without any prefill worker that fits."""
    model = slow_model(tmp_path_factory.mktemp("slow-model"))
    with running_cluster(model.folder, make_scratch(), prefill=0, worker_options=WORKER_OPTIONS) as cluster:
        yield Judge(cluster, model)


@pytest.fixture
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("other-weights"), seed=1).folder


#: Fields of the manifest in which the other worker differs.
FIELDS = ("weights_fingerprint", "kv_dtype", "max_model_len")


def test_pair_that_does_not_fit_is_refused_in_words_on_both_sides(judge: Judge, other_weights: Path) -> None:
    """The words name every field that differs; that each alone is reason enough is for the manifest's own tests."""
    cluster = judge.cluster
    options = {"model": str(other_weights), "dtype": "bfloat16", "max_model_len": "1024"}
    address = cluster.add_worker("prefill-0", **options).address
    try:
        there, here = cluster.manifest("prefill-0"), cluster.manifest("decode-0")
        for name, peer, ours, theirs in (("decode-0", address, here, there), ("prefill-0", "decode-0", there, here)):
            reason = eventually(lambda name=name, peer=peer: _refusal(cluster, name, peer), what=f"refusal by {name}")
            for field in FIELDS:
                values = {getattr(ours, field), getattr(theirs, field)}
                assert len(values) == 2
                assert set(map(repr, values)) <= set(_values(reason, field)), (reason, values)
        assert not cluster.status("decode-0").paired
        # The gateway may know that worker as well; nobody's KV comes from it.
        for _ in range(3):
            assert judge.normal_request() == "decode-0"
        judge.recovered()
    finally:
        cluster.members.pop("prefill-0").kill()


def _refusal(cluster: Cluster, worker: str, peer: str) -> str:
    """Why `worker` refuses `peer`, which it calls by address or id; empty if it does not."""
    return next((reason for reason in cluster.status(worker).refused if reason.startswith(peer)), "")


def _values(reason: str, field: str) -> list[str]:
    """Both values of `field` out of "field: X here, Y there; ..."."""
    part = next(part for part in reason.split("; ") if f"{field}: " in part).split(f"{field}: ")[1]
    return [value.rsplit(" ", 1)[0] for value in part.split(", ")]

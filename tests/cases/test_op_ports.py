"""OP-06: ports that are taken, ports that were just left, and processes whose parent is gone."""

import re
import subprocess
import sys

import pytest

from deploy.ports import free_port
from deploy.spawned import dying_with_me
from tests.cases.case_data import post
from tests.cases.processes import is_running
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, System
from tests.e2e.cluster import LOOPBACK, PATIENCE, Member, eventually
from tests.e2e.failure_fixtures import registered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def start_again(member: Member, **changed: str) -> subprocess.Popen[str]:
    """A second process with the options of `member`, but for those changed."""
    options = {**member.options, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    command = (sys.executable, "-m", member.module, *(text for pair in options.items() for text in pair))
    return subprocess.Popen(
        dying_with_me(command), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=dict(member.env)
    )


@pytest.mark.parametrize(
    ("name", "taken", "others"),
    [
        ("gateway", "http_port", ["grpc_port"]),
        ("gateway", "grpc_port", ["http_port"]),
        ("prefill-0", "port", ["metrics_port"]),
        ("prefill-0", "metrics_port", ["port"]),
        ("decode-0", "port", ["metrics_port"]),
        ("decode-0", "metrics_port", ["port"]),
    ],
)
def test_op_06_a_port_in_use_is_noticed_before_the_model_loads(
    system: System, name: str, taken: str, others: list[str]
) -> None:
    member = system.cluster.members[name]
    changed = {"worker_id": "second"} if name != "gateway" else {}
    process = start_again(member, **changed, **{other: str(free_port()) for other in others})
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, None)
    port = member.options[f"--{taken.replace('_', '-')}"]
    assert f"{LOOPBACK}:{port}" in complaint, complaint
    assert not re.search(r"model loaded|\bready\b|Traceback", complaint), complaint
    assert "second" not in registered(system.cluster)


def test_op_06_a_port_that_was_just_left_is_free(slow_system: System) -> None:
    """Connections of the old owner may be in TIME_WAIT; workers are restarted so in PD-05."""
    gateway = slow_system.cluster.members["gateway"]
    with RawStream(slow_system, post("/v1/completions", {"prompt": "x", "max_tokens": 500, "stream": True})) as stream:
        stream.read_events(1)
        gateway.kill()
    gateway.start()
    slow_system.cluster.wait_ready()
    assert slow_system.send(CONTROL).text == slow_system.control_text


PARENT = """
import subprocess, sys
from deploy.spawned import dying_with_me
child = subprocess.Popen(dying_with_me(tuple(sys.argv[1:])))
print(child.pid, flush=True)
child.wait()
"""


def test_op_06_orphans_end_by_themselves(system: System) -> None:
    """As `tandem up` starts them: the parent is killed, and the same command can run again at once."""
    member = system.cluster.members["prefill-0"]
    options = {
        **member.options,
        "--worker-id": "orphan",
        "--port": str(free_port()),
        "--metrics-port": str(free_port()),
    }
    command = (sys.executable, "-m", member.module, *(text for pair in options.items() for text in pair))
    for _ in range(2):
        parent = subprocess.Popen(
            (sys.executable, "-c", PARENT, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(member.env),
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: "orphan" in registered(system.cluster), what="the worker being ready")
        parent.kill()
        parent.wait(PATIENCE)
        parent.stdout.close()
        eventually(lambda child=child: not is_running(child), what="its end")
        eventually(lambda: "orphan" not in registered(system.cluster), what="its heartbeat to lapse")

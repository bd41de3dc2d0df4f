import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_store.process import ProcessId

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_this_process_is_alive() -> None:
    own = ProcessId.own()
    assert own.pid == os.getpid()
    assert own.start > 0
    assert not own.is_dead()


def test_a_killed_process_is_dead_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = dataclasses.replace(ProcessId.own(), pid=child.pid, start=start_time(child.pid))
    assert not process.is_dead()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_dead()
    child.communicate()
    assert process.is_dead()


def test_a_pid_that_was_given_anew_does_not_keep_its_former_owner_alive() -> None:
    assert dataclasses.replace(ProcessId.own(), start=1).is_dead()


def test_nothing_is_proved_about_other_hosts() -> None:
    assert not dataclasses.replace(ProcessId.own(), host_id="elsewhere", pid=2**22 + 1).is_dead()


def test_a_peer_that_told_no_pid_is_never_proved_dead() -> None:
    assert not dataclasses.replace(ProcessId.own(), pid=0).is_dead()

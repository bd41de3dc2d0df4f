"""The test's end of an `endpoint` process, and a pair of them with the words between them passed on."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

Event = dict[str, Any]
ROOT = Path(__file__).parents[2]
PATIENCE = 40.0


class Endpoint:
    """Starts the process; `events` grows as it speaks, and `listener` sees each event on the reader thread."""

    def __init__(self, name: str, transport: str, **options: Any) -> None:
        self.name = name
        self.events: list[Event] = []
        self.listener: Callable[[Event], None] = lambda event: None
        self._changed = threading.Condition()
        self._tags = itertools.count()
        self._environment = dict(os.environ)
        kind, _, tls = transport.partition(":")
        if tls:
            self._environment["UCX_TLS"] = tls
        defaults = {"seed": 1, "shape": [6, 300, 16, 2, 8], "slots": 8, "slot_bytes": 16384, "buffers": 4}
        self._options = json.dumps({**defaults, **options, "name": name, "transport": kind})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_store.endpoint", self._options],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @cached_property
    def info(self) -> str:
        """Its TransportPeer, once it is up."""
        return str(self.wait("Ready")["info"])

    def do(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def wait(self, event: str, **fields: Any) -> Event:
        """The first event of that name and with those fields, past or to come."""

        def found() -> Event | None:
            wanted = {"event": event, **fields}
            return next((e for e in self.events if all(e.get(k) == v for k, v in wanted.items())), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, PATIENCE), (
                f"{self.name} never said {event} {fields}: {self.events[-5:]}"
            )
            result = found()
        assert result is not None
        return result

    def ask(self, command: str, event: str, **arguments: Any) -> Event:
        tag = next(self._tags)
        self.do(command, tag=tag, **arguments)
        return self.wait(event, tag=tag)

    def counters(self) -> Event:
        return self.ask("count", "Counters")

    def wait_for_counters(self, condition: Callable[[Event], bool]) -> Event:
        deadline = time.monotonic() + PATIENCE
        while not condition(counters := self.counters()):
            assert time.monotonic() < deadline, f"{self.name}: {counters}"
            # Asked without a pause, both processes would be busy with answers.
            threading.Event().wait(0.01)
        return counters

    def digest(self, slots: list[int]) -> str:
        return str(self.ask("digest", "Digest", slots=slots)["digest"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def close(self) -> int:
        """Let it end by itself; returns its exit status."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self._reader.join()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None and not stream.closed:
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            self.listener(event)
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()


class Pair:
    """Passes credits and seals between a sender and a receiver, as the workers' gRPC stream would.

    What either said before, of an earlier pair, is forgotten.
    """

    def __init__(self, sender: Endpoint, receiver: Endpoint) -> None:
        self.sender = sender
        self.receiver = receiver
        #: Fires when the first message of a transfer has surely been written: a second round of credits came.
        self.credited = threading.Semaphore(0)
        infos = (sender.info, receiver.info)
        for endpoint, listener in ((receiver, self._from_receiver), (sender, self._from_sender)):
            endpoint.listener = listener
            endpoint.events.clear()
        sender.do("connect", peer=receiver.name, info=infos[1], receive=False)
        assert sender.wait("Connected", peer=receiver.name)["error"] == "None"
        receiver.do("connect", peer=sender.name, info=infos[0], receive=True)
        assert receiver.wait("Connected", peer=sender.name)["error"] == "None"

    def start(self, transfer_id: int, source: list[int], target: list[int], **options: Any) -> None:
        self.receiver.do("receive", transfer_id=transfer_id, peer=self.sender.name, slots=target)
        arguments = {"chunk": 64, **options}
        self.sender.do("send", transfer_id=transfer_id, peer=self.receiver.name, slots=source, **arguments)

    def _from_receiver(self, event: Event) -> None:
        if event["event"] == "CreditsReady" and event["peer"] == self.sender.name:
            if self.sender.process.poll() is None:
                self.sender.do("credits", peer=self.receiver.name, grants=event["grants"])
            self.credited.release()

    def _from_sender(self, event: Event) -> None:
        mine = event["event"] == "SendFinished" and event["peer"] == self.receiver.name
        if mine and event["outcome"] == "ok":
            self.receiver.do(
                "seal", transfer_id=event["transfer_id"], messages=event["messages"], num_bytes=event["bytes"]
            )

"""Runs a `LocalPlan`: starts its processes in order, tells of each slow step, stops them in order.

The life of `tandem up`: Valkey answers -> workers and gateway started -> the gateway knows every worker as ready ->
URLs printed -> (restarts as needed) -> SIGINT or SIGTERM -> gateway, decode, prefill drained -> Valkey stopped.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from common.config import ENV_PREFIX, EXIT_INTERRUPTED
from common.errors import ConfigError
from common.redis_client import open_redis
from deploy import valkey
from deploy.api_key import own_headers
from deploy.local import DECODE, GATEWAY, PREFILL, LocalPlan, gateway_spec, role_of, worker_specs
from deploy.supervisor import Keeper, ProcessSpec

#: Between two looks at a process that has no way of telling us when it is ready.
LOOK_SECONDS = 0.2
#: Between two lines that say what is still waited for.
REMIND_SECONDS = 20.0
#: What a Redis that was named may take to answer: it may just be starting too.
REDIS_SECONDS = 5.0
#: Lives that a process may lose before everything has been ready once. One that never comes up must not be tried for
#: ever; one that has served is started again without end.
LIVES = 3

Say = Callable[[str], None]


class Launcher:
    """All processes of one plan; `run` once.

    Args:
        say: takes a line of progress. (The children's own output goes to stderr, each line under its name.)
    """

    def __init__(self, plan: LocalPlan, say: Say) -> None:
        self._plan = plan
        self._say = say
        self._keepers: dict[str, Keeper] = {}
        self._hard = False

    async def run(self) -> int:
        """Start everything, keep it running until SIGINT, SIGTERM or SIGHUP, stop everything; the exit code.

        Raises:
            ChildRefused: a process refuses its options. The others have been stopped.
            ConfigError: the Redis that was named does not answer, or a process dies again and again at its start.
        """
        #: Why we end: told to (a result), or something went wrong (an exception).
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="tandem-") as scratch, _on_stop_signal(self._stop_asked):
            starting = asyncio.create_task(self._start_all(Path(scratch)))
            starting.add_done_callback(self._watch)
            try:
                await self._end
            finally:
                starting.cancel()
                await asyncio.wait([starting])
                await self._stop_all()
        return EXIT_INTERRUPTED if self._hard else 0

    async def _start_all(self, scratch: Path) -> None:
        plan = self._plan
        if not plan.redis_url:
            plan = replace(plan, redis_url=valkey.valkey_url(scratch))
            self._start(valkey.valkey_spec(scratch))
            while not await valkey.answers(scratch):  # noqa: ASYNC110  # another process: nothing to await
                await asyncio.sleep(LOOK_SECONDS)
        else:
            await require_redis(plan.redis_url)
        workers = worker_specs(plan)
        self._say(f"loading {plan.model_name}: {', '.join(spec.name for spec in workers)}")
        for spec in (*workers, gateway_spec(plan)):
            self._start(spec)
        await self._until_ready({spec.name for spec in workers})
        self._say(ready_text(plan, asks_for_keys=bool(own_headers(os.environ))))

    def _start(self, spec: ProcessSpec) -> None:
        keeper = self._keepers[spec.name] = Keeper(spec, print_line)
        keeper.start()
        keeper.done.add_done_callback(self._watch)

    async def _until_ready(self, loading: set[str]) -> None:
        """Wait until the gateway knows all workers named in `loading` as ready, and is itself."""
        reminded = time.monotonic()
        headers = own_headers(os.environ)
        url = self._plan.http_url
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0, trust_env=False) as gateway:
            while loading or not await _is_ready(gateway):
                for name in sorted(loading & await _ready_workers(gateway)):
                    loading.remove(name)
                    self._say(f"{name}: ready")
                self._require_lives()
                if time.monotonic() - reminded > REMIND_SECONDS:
                    reminded = time.monotonic()
                    self._say(f"still waiting for {', '.join(sorted(loading)) or 'the gateway'}")
                await asyncio.sleep(LOOK_SECONDS)

    def _require_lives(self) -> None:
        for name, keeper in self._keepers.items():
            if keeper.starts > LIVES:
                raise ConfigError(f"{name} has died {LIVES} times at its start; its output says why")

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A task that failed (a child that refuses its options, or a bug of ours) ends everything."""
        if not task.cancelled() and (error := task.exception()) and not self._end.done():
            self._end.set_exception(error)

    def _stop_asked(self) -> None:
        """First signal: end in order. Another one: at once."""
        if not self._end.done():
            self._say("stopping: what runs may finish (Ctrl-C again stops at once)")
            self._end.set_result(None)
            return
        self._hard = True
        for keeper in self._keepers.values():
            keeper.kill()

    async def _stop_all(self) -> None:
        """Each before what it leans on: the gateway, so that nothing new comes in; decode workers, which would take the
        end of a prefill worker for a loss; prefill workers; Valkey, for the others say goodbye in it."""
        for role in (GATEWAY, DECODE, PREFILL, valkey.NAME):
            stopping = [keeper for name, keeper in self._keepers.items() if role_of(name) == role]
            await asyncio.gather(*(keeper.stop() for keeper in stopping))


async def require_redis(url: str, *, seconds: float = REDIS_SECONDS) -> None:
    """Wait until the server at `url` answers. Raises ConfigError (without the URL, which may hold a password)."""
    deadline = time.monotonic() + seconds
    async with open_redis(url) as redis:
        while True:
            try:
                await redis.ping()
                return
            except (RedisError, OSError) as error:
                if time.monotonic() > deadline:
                    raise ConfigError(f"no answer from Redis in {seconds:g} s: {error}", field="--redis") from error
            await asyncio.sleep(LOOK_SECONDS)


async def _ready_workers(gateway: httpx.AsyncClient) -> set[str]:
    try:
        answer = await gateway.get("/tandem/status")
    except httpx.HTTPError:
        return set()
    if answer.status_code != httpx.codes.OK:
        return set()
    return {worker["id"] for worker in answer.json()["workers"] if worker["state"] == "ready"}


async def _is_ready(gateway: httpx.AsyncClient) -> bool:
    try:
        return (await gateway.get("/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def _on_stop_signal(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def print_line(name: str, line: str) -> None:
    """A child's line of output, under its name, on stderr."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


def _tandem_command() -> str:
    """How to call `tandem` from the user's shell, which may not have the virtual environment on its path."""
    return "tandem" if shutil.which("tandem") else os.path.relpath(sys.argv[0])


def ready_text(plan: LocalPlan, *, asks_for_keys: bool) -> str:
    """What to do with a system that is ready. Keys themselves are not shown."""
    variable = f"{ENV_PREFIX}API_KEY"
    key = f' -H "Authorization: Bearer ${variable}"' if asks_for_keys else ""
    hint = f"\nThe gateway asks for a key: set {variable} to one of them where you try." if asks_for_keys else ""
    message = '"messages": [{"role": "user", "content": "Hello!"}]'
    body = f'{{"model": "{plan.model_name}", "stream": true, "max_tokens": 100, "temperature": 0.2, {message}}}'
    return f"""ready
  OpenAI API  {plan.http_url}/v1   (metrics: {plan.http_url}/metrics)
  gRPC        {plan.grpc_target}
Try:
  curl -N {plan.http_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'
  {_tandem_command()} chat --url {plan.http_url}
Ctrl-C stops everything.{hint}"""

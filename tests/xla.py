"""XLA's flags in the tests: eight virtual devices, and little optimization.

Of tiny programs most of the time goes into making them fast. Flags of one's own that name an optimization level go
before: `make test-slow` has XLA's default, and so have runs of several processes.
"""

import os
from importlib.metadata import version

OWN = os.environ.get("XLA_FLAGS", "")
QUICK = "--xla_backend_optimization_level=0"
if version("jax").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # later ones know no such flag, and end
FLAGS = f"--xla_force_host_platform_device_count=8 {OWN if 'optimization_level' in OWN else f'{OWN} {QUICK}'}"

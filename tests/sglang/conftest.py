"""SGLang's own classes on a CPU: host pools, the controller of its HiCache, its storage factory and failure injector."""

import os
import sys
from pathlib import Path

# SGLang asks for a device while it is imported; an empty list makes that fail.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
# It builds its hash function with ninja, which lies beside Python.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

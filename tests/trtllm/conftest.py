"""The stand-in for TensorRT-LLM takes its place: the real one cannot be imported without a GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

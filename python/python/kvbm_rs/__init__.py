"""A KV block manager for LLM inference: device, host, disk and object tiers.

Settings are those of docs/configuration.md: `Settings.from_environment()`, `Settings.from_dict({...})`,
`Settings.from_toml(text)`.
"""

from kvbm_rs import errors
from kvbm_rs._native import Settings, version

__version__ = version()

__all__ = ["Settings", "errors", "version"]

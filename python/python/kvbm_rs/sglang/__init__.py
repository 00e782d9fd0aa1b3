"""What plugs into SGLang, as its HiCache's storage. docs/sglang.md shows how to configure it.

| module | holds |
|---|---|
| `config` | what the extra configuration may say, and what the bytes of pages depend on |
| `pages` | the pages of one host pool, and how they come and go |
| `storage` | `KvbmStorage`, the class that SGLang loads |
"""

from kvbm_rs.logs import logger_below

logger = logger_below("sglang")

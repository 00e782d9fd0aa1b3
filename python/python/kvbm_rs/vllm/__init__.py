"""What plugs into vLLM. Each is loaded by the name of its class, as vLLM's configuration says:

| class | in vLLM's configuration |
|---|---|
| `kvbm_rs.vllm.connector.KvbmConnector` | `"kv_connector": "KvbmConnector", "kv_connector_module_path": "kvbm_rs.vllm.connector"` |
| `kvbm_rs.vllm.policy.HazardPolicy` | `"eviction_policy": "HazardPolicy", "cache_policy_module_path": "kvbm_rs.vllm.policy"` |
| `kvbm_rs.vllm.tier.KvbmTier` | in `secondary_tiers`: `"type": "KvbmTier", "module_path": "kvbm_rs.vllm.tier"` |
"""

from kvbm_rs.logs import logger_below

# vLLM shows what is below its own.
logger = logger_below("vllm")

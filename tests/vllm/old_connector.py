"""`KvbmConnector` as vLLM 0.29 calls it: it is bound to the pool of blocks alone, and asked for loads by `get_finished`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvbm_rs.vllm import connector


class OldConnector(connector.KvbmConnector):
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received)

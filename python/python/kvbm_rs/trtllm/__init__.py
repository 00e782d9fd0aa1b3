"""What plugs into TensorRT-LLM, by its KV cache connector. docs/trtllm.md shows how to configure it.

| module | holds |
|---|---|
| `connector` | `KvbmScheduler` and `KvbmWorker`, the classes that TensorRT-LLM loads |
| `engine` | what both share: the manager, and copies under way |
| `names` | names of blocks, from a request's tokens |
"""

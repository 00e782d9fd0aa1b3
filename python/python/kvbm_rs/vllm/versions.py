"""The version of vLLM that the package is tested with."""

import logging

import vllm

logger = logging.getLogger("vllm.kvbm")

TESTED = "0.32.0"


def warn(what: str, version: str = vllm.__version__) -> None:
    """Says at the start, by its name, that this version of vLLM has not been tested with `what`."""
    # A build's own name follows a plus.
    if version.partition("+")[0] != TESTED:
        logger.warning("%s is tested with vLLM %s, and has never run with %s, which this is", what, TESTED, version)

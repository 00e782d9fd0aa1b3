"""Stands in for TensorRT-LLM, which needs a GPU to be imported: its connector's interface, and the order in which it calls it."""

__version__ = "stand-in"

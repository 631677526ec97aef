"""ONNX Runtime, imported the one way that Edge imports it."""

import os

# Else importing it writes a device id into the user's home and reports to its maker. Nothing leaves
# a user's devices unless the user sends it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["ort"]

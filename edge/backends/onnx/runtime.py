"""ONNX Runtime without telemetry. All of Edge imports it from here."""

import os

# Otherwise the import writes a device id into the user's home and reports to the vendor. Nothing
# leaves a user's devices unless the user sends it.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["ort"]

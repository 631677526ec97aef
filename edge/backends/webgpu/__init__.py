"""GPUs of every vendor: a shard as ONNX Runtime sessions on WebGPU."""

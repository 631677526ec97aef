"""How is an ONNX graph read, cut and put together?

Files are read as what they are: bytes from outside. Nothing here computes a graph.
"""

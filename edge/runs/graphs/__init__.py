"""How does a graph of any kind run on its peers: measured, cut, run, and cut again after a loss."""

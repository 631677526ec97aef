"""Clusters of unequal devices, made of one Linux machine: shares of cores, limited networks."""

"""Clusters of pinned peers on one Linux machine: cores, limited networks, limited memory."""

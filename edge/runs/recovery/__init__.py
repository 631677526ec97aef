"""A model goes on: without a device that is lost, and with one that joins."""

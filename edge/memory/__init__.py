"""Sizes of models, shards and steps, and the ledger of a device's memory."""

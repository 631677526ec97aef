"""Failover and growth: a model goes on without a lost device, and with one that joins."""

"""How is a shard computed? One folder a kind of device, one interface."""

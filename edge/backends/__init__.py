"""Back ends that compute a shard: one interface, and a folder for each kind of device."""

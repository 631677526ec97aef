"""How one operator is computed, on each kind of device."""

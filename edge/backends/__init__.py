"""What a family is lowered to, one file per kind of device."""

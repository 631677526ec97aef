"""Files of weights: formats, checks, direct reads and durable writes."""

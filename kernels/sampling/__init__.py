"""From logits to the next token: greedy or seeded random choice, the same on every plan."""

"""Model families, each described once as data."""

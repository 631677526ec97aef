"""Towers (vision encoders) as data, and the families of models that have them."""

"""A back end that computes nothing and answers with made-up numbers."""

"""What a layer has of each token in addition to the hidden state."""

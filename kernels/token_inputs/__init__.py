"""What a layer has of each token besides the hidden state."""

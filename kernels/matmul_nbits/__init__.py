"""A product with a weight of 2, 4 or 8 bits per element: `com.microsoft::MatMulNBits`."""

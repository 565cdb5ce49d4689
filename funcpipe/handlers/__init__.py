"""What a cloud calls in a function, one module per runtime."""

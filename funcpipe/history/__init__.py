"""What earlier runs took: predicted beside observed in a local file, and later predictions corrected by it."""

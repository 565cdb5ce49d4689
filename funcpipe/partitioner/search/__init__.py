"""How plans are searched exactly: spaces cut into windows of time, and labels inside a window."""

"""AWS: functions on Lambda, what they need, and how it is set up and taken away."""
